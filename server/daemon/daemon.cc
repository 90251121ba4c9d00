#include "server/daemon/daemon.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dmuond/fault/fault_point.h"
#include "scheduler/convert/convert.h"
#include "server/common/errors.h"
#include "server/common/log.h"

namespace dmuond::server {
namespace {

constexpr std::chrono::milliseconds kReaped{100};  // how long a tick waits for the end of lanes

// Fault points of what the coordinator is about to say. It has decided, and nobody knows yet.
void AboutToSend(const v1::CoordinatorMessage& message) {
  if (message.has_open()) fault::FaultPoint("coordinator.open");
  if (message.has_goes()) fault::FaultPoint("coordinator.go");
  if (message.has_decision()) {
    fault::FaultPoint("coordinator.decided");
    fault::FaultPoint("coordinator.before_send");
  }
  if (message.has_reform()) fault::FaultPoint("coordinator.reform");
  if (message.has_roll_back()) fault::FaultPoint("coordinator.roll_back");
  if (message.has_republish()) fault::FaultPoint("coordinator.restart");
}

// Fault points of what the coordinator is about to hear.
void AboutToHear(const v1::MemberMessage& message) {
  if (message.has_registration()) fault::FaultPoint("coordinator.registration");
  if (message.reports().submitted_size() > 0) fault::FaultPoint("coordinator.submission");
  if (message.has_vote()) fault::FaultPoint("coordinator.vote");
}

}  // namespace

Daemon::Daemon(DaemonOptions options, kernels::MemoryHolder& memory)
    : options_(std::move(options)),
      memory_(memory),
      lane_host_(
          {.binary = options_.lane_binary,
           .device = absl::StrCat("cpu:", options_.threads_per_lane),
           .lanes = options_.lanes,
           .lock = options_.lock},
          {.on_report =
               [this](uint64_t generation, scheduler::LaneIndex lane,
                      const v1::LaneReport& report) { OnLaneReport(generation, lane, report); },
           .on_gone =
               [this](uint64_t generation, scheduler::LaneIndex lane,
                      const std::string& last_words) {
                 OnLaneGone(generation, lane, last_words);
               }}) {
  if (options_.node == 0) {
    coordinator_ = std::make_unique<scheduler::GroupJob>(options_.coordinator);
  }
  if (options_.storage == nullptr) return;
  writes_ = std::make_unique<Disk>(*options_.storage, options_.snapshot_timeout);
  reads_ = std::make_unique<Disk>(*options_.storage, options_.snapshot_timeout);
}

Daemon::~Daemon() {
  StateLock lock(mutex_);
  if (job_ != nullptr) job_->snapshots.Abandon("the daemon ends");
}

void Daemon::Bind(AttachServer* attach, PeerLinks* peers) {
  attach_ = attach;
  peers_ = peers;
}

absl::StatusOr<bool> Daemon::Wait(const std::function<bool()>& ready, Deadline deadline,
                                  const Cancelled& cancelled) {
  // A caller that hangs up is noticed within this time.
  constexpr std::chrono::milliseconds kLookAtCaller{250};
  while (!ready()) {
    const auto now = std::chrono::steady_clock::now();
    if (now >= deadline) return false;
    mutex_.WaitUntil(ready, std::min(deadline, now + kLookAtCaller));
    if (!ready() && cancelled()) return absl::CancelledError("the caller has gone");
  }
  return true;
}

bool Daemon::Published() const {
  if (job_ == nullptr) return true;
  if (job_->reforming || job_->broken_since.has_value()) return false;
  if (!job_->steps.has_value()) return true;
  const std::optional<scheduler::Decision>& decided = job_->steps->last_decision();
  if (!decided.has_value()) return true;
  // Attempts that were aborted or refused are not published; the newest one that was is remembered.
  return job_->published_attempt >= job_->applied_attempt;
}

absl::Status Daemon::WaitUntilPublished(const Cancelled& cancelled) {
  constexpr std::chrono::seconds kPublishTimeout{60};
  ++waiting_for_published_;
  absl::StatusOr<bool> published =
      Wait([this]() DMUOND_REQUIRES(mutex_) { return Published() || !JobFailure().ok(); },
           std::chrono::steady_clock::now() + kPublishTimeout, cancelled);
  --waiting_for_published_;
  if (!published.ok()) return published.status();
  if (absl::Status failure = JobFailure(); !failure.ok()) return failure;
  if (!*published) {
    return Error(absl::StatusCode::kDeadlineExceeded, "LANE_LOST",
                 "the lanes have not published the last step in time");
  }
  return absl::OkStatus();
}

absl::StatusOr<Session*> Daemon::Find(const v1::SessionKey& key) {
  const auto found = sessions_.find(key.session());
  const absl::Status* ended = ended_sessions_.Find(key);
  if (found == sessions_.end() && ended != nullptr) {
    if (draining_) {  // what a trainer hears that waits for the successor
      return Error(absl::StatusCode::kUnavailable, "DRAINING", "this daemon is leaving");
    }
    if (!ended->ok()) return *ended;
    return Error(absl::StatusCode::kUnavailable, "JOB_ENDED",
                 Say("the job of session ", Named("session", key.session()),
                     " ended as the session began: open a new one"));
  }
  if (found == sessions_.end() || !SameSecret(found->second.secret, key.secret())) {
    return Error(absl::StatusCode::kFailedPrecondition, "INCARNATION_OLD",
                 Say("session ", Named("session", key.session()),
                     " is not open here: it closed, its trainer "
                     "was gone, or its job ended. Open a new one"));
  }
  Session& session = found->second;
  if (session.incarnation != key.incarnation()) {
    return Error(absl::StatusCode::kFailedPrecondition, "INCARNATION_OLD",
                 Say("rank ", Named("rank", session.rank), " is at incarnation ",
                     Named("incarnation", session.incarnation), ", the call carries ",
                     Named("given_incarnation", key.incarnation())));
  }
  return &session;
}

absl::Status Daemon::CheckKey(const v1::SessionKey& key, const Caller* caller) {
  StateLock lock(mutex_);
  absl::StatusOr<Session*> found = Find(key);
  if (!found.ok()) return found.status();
  const Session& session = **found;
  if (caller == nullptr) return absl::OkStatus();
  // The session's process lives as long as the session, so its pid is nobody else's. Where the
  // daemon does not see it, users are told apart, and nothing more.
  if (session.pid == caller->pid && (session.pid != 0 || session.uid == caller->uid)) {
    return absl::OkStatus();
  }
  return Error(absl::StatusCode::kPermissionDenied, "SESSION_NOT_YOURS",
               Say("the session of rank ", Named("rank", session.rank), " is that of process ",
                   Named("pid", session.pid), ", the call comes from process ",
                   Named("other_pid", caller->pid), " (uid ", Named("other_uid", caller->uid),
                   "): a child that was forked must open a session of its own"));
}

absl::Status Daemon::JobFailure() const {
  return job_ == nullptr ? absl::OkStatus() : job_->failed;
}

void Daemon::Tell(v1::MemberMessage message) { Send(reports_.Tell(std::move(message))); }

void Daemon::Send(scheduler::OutgoingReports::Messages messages) {
  std::move(messages.begin(), messages.end(), std::back_inserter(told_));
  Pump();
}

void Daemon::OnDue() {
  StateLock lock(mutex_);
  const auto now = std::chrono::steady_clock::now();
  if (coordinator_ != nullptr) Perform(coordinator_->OnDue(now));
  Send(reports_.OnDue(now));
}

void Daemon::Perform(scheduler::GroupActions actions) {
  for (scheduler::Addressed& addressed : actions.messages) {
    AboutToSend(addressed.message);
    const bool remote = !addressed.node.has_value() || *addressed.node != options_.node;
    const bool here = !addressed.node.has_value() || *addressed.node == options_.node;
    if (remote && options_.nodes > 1) peers_->SendToMembers(addressed.node, addressed.message);
    if (addressed.message.has_decision()) fault::FaultPoint("coordinator.sent");
    if (here) heard_.push_back(std::move(addressed.message));
  }
  // A daemon that has left has no worker, and its coordinator no group.
  if (!actions.plan.has_value() || worker_ == nullptr) return;
  worker_->Post([this, order = *std::move(actions.plan)] {
    absl::StatusOr<scheduler::PlannedJob> made = planner_.Make(*order.inputs);
    StateLock lock(mutex_);
    Perform(
        coordinator_->OnPlanMade(std::chrono::steady_clock::now(), order.number, std::move(made)));
    Pump();
  });
}

void Daemon::CoordinatorHears(int32_t node, const v1::MemberMessage& message) {
  AboutToHear(message);
  Perform(coordinator_->OnMessage(std::chrono::steady_clock::now(), node, message));
}

// Moves messages between this node's member and the coordinator until both are idle. What they
// cause is queued, not nested: neither sees a half-handled message of its own.
void Daemon::Pump() {
  if (pumping_) return;
  pumping_ = true;
  while (!told_.empty() || !heard_.empty()) {
    if (!heard_.empty()) {
      const v1::CoordinatorMessage message = std::move(heard_.front());
      heard_.pop_front();
      Handle(message);
      continue;
    }
    const v1::MemberMessage message = std::move(told_.front());
    told_.pop_front();
    if (coordinator_ != nullptr) {
      CoordinatorHears(options_.node, message);
    } else {
      peers_->SendToCoordinator(message);
    }
  }
  pumping_ = false;
  for (const auto due :
       {reports_.due(), coordinator_ != nullptr ? coordinator_->due() : std::nullopt}) {
    if (due.has_value()) due_timer_.Set(*due);
  }
}

void Daemon::Handle(const v1::CoordinatorMessage& message) {
  using Kind = v1::CoordinatorMessage::MessageCase;
  switch (message.message_case()) {
    case Kind::kPlan:
      return HandlePlan(message.plan());
    case Kind::kRefused:
      return HandleRefused(message.refused());
    case Kind::kRendezvous: {
      if (job_ == nullptr) return;
      v1::LaneCommand command;
      *command.mutable_rendezvous() = message.rendezvous();
      return ToLane(scheduler::LaneIndex(message.rendezvous().rail()), command);
    }
    case Kind::kOpen:
      return HandleOpen(message.open());
    case Kind::kGoes:
      return HandleGoes(message.goes());
    case Kind::kSubmitted: {
      if (job_ == nullptr) return;
      v1::LaneCommand command;
      *command.mutable_submitted() = message.submitted();
      return ToLanes(command);
    }
    case Kind::kDecision:
      return HandleDecision(message.decision());
    case Kind::kRepublish:
      return HandleRepublish(message.republish());
    case Kind::kExpel:
      return HandleExpel(message.expel());
    case Kind::kGatherOverdue:
      return HandleGatherOverdue(message.gather_overdue());
    case Kind::kReform:
      return HandleReform(message.reform());
    case Kind::kHalted:
      return HandleHalted(message.halted());
    case Kind::kSave:
      return HandleSave(message.save());
    case Kind::kWriteManifest:
      return HandleWriteManifest(message.write_manifest());
    case Kind::kSnapshotDone:
      return HandleSnapshotDone(message.snapshot_done());
    case Kind::kRollBack:
      return HandleRollBack(message.roll_back());
    case Kind::kFindSnapshot:
      return HandleFindSnapshot(message.find_snapshot());
    case Kind::kDiscard:
      return HandleDiscard(message.discard());
    case Kind::kWaiting:
      return HandleWaiting(message.waiting());
    case Kind::kJobEnded:
      return HandleJobEnded(message.job_ended());
    default:
      return;
  }
}

void Daemon::HandleGoes(const v1::Goes& goes) {
  if (job_ == nullptr) return;
  for (int32_t rail = 0; rail < options_.lanes; ++rail) {
    v1::LaneCommand command;
    for (const v1::Go& go : goes.goes()) {
      if (go.rail() == rail) *command.mutable_goes()->add_goes() = go;
    }
    if (!command.has_goes()) continue;
    *command.mutable_goes()->mutable_absent() = goes.absent();
    ToLane(scheduler::LaneIndex(rail), command);
  }
}

void Daemon::ToLane(scheduler::LaneIndex lane, const v1::LaneCommand& command,
                    const std::vector<int>& fds) {
  lane_host_.Send(lane, command, fds).IgnoreError();
}

void Daemon::ToLanes(const v1::LaneCommand& command) {
  for (size_t i = 0; i < job_->lanes.size(); ++i) {
    const scheduler::LaneIndex lane(static_cast<int32_t>(i));
    // One that is new hears what it needs when it is ready.
    if (job_->lanes[lane].ready()) ToLane(lane, command);
  }
}

void Daemon::OnFormed(uint32_t epoch) {
  StateLock lock(mutex_);
  epoch_ = epoch;
  newest_epoch_.store(epoch);
  reports_.Forget();
  fault::FaultPoint("daemon.formed");
  log::Info("group formed",
            {{"epoch", absl::StrCat(epoch)}, {"nodes", absl::StrCat(options_.nodes)}});
  if (job_ != nullptr) job_->broken_since.reset();
  if (coordinator_ != nullptr) {
    Perform(coordinator_->OnFormed(std::chrono::steady_clock::now(), epoch));
    Pump();
  }
  halted_ = false;
  TellMemberState();
  mutex_.Changed();
}

bool Daemon::formed() {
  StateLock lock(mutex_);
  return epoch_ != 0;
}

void Daemon::OnMemberMessage(int32_t node, const v1::MemberMessage& message) {
  StateLock lock(mutex_);
  CoordinatorHears(node, message);
  Pump();
}

void Daemon::OnMemberGone(int32_t node, const std::string& why) {
  StateLock lock(mutex_);
  Perform(coordinator_->OnMemberGone(std::chrono::steady_clock::now(), node, why));
  Pump();
  HandleBroken(absl::StrCat("the daemon of node ", node, " is gone: ", why));
}

void Daemon::OnCoordinatorMessage(const v1::CoordinatorMessage& message) {
  StateLock lock(mutex_);
  heard_.push_back(message);
  Pump();
}

void Daemon::OnCoordinatorGone(const std::string& why) {
  StateLock lock(mutex_);
  HandleBroken(absl::StrCat("the coordinating daemon is gone: ", why));
}

// Who waits for weights that nobody will publish is woken by poison, and then asks why.
void Daemon::Fail(absl::Status status) {
  if (job_ == nullptr) return;
  if (job_->failed.ok()) job_->failed = std::move(status);
  if (job_->memory != nullptr) job_->memory->PoisonAll();
  mutex_.Changed();
}

void Daemon::OnLaneReport(uint64_t generation, scheduler::LaneIndex lane,
                          const v1::LaneReport& report) {
  using Kind = v1::LaneReport::ReportCase;
  StateLock lock(mutex_);
  if (generation != generation_ || job_ == nullptr) return;
  job_->lanes.OnReport(lane);
  v1::MemberMessage message;
  switch (report.report_case()) {
    case Kind::kReady: {
      if (job_->lanes.OnReady(lane, report.ready().device())) OnLanesReady();
      return;
    }
    case Kind::kRendezvous:
      *message.mutable_rendezvous() = report.rendezvous();
      return Tell(std::move(message));
    case Kind::kRailReady: {
      const absl::StatusOr<scheduler::RailReady> ready = FromProto(report.rail_ready());
      if (!ready.ok()) return;  // a lane is of the same build as its daemon
      return Send(reports_.OnReady(std::chrono::steady_clock::now(), *ready));
    }
    case Kind::kGathered: {
      if (!job_->steps.has_value()) return;
      job_->lanes.OnGathered(
          lane, report.gathered().attempt(),
          {report.gathered().non_finite().begin(), report.gathered().non_finite().end()});
      std::vector<scheduler::UnitNorm> norms;
      norms.reserve(report.gathered().norms_size());
      for (const v1::UnitNorm& norm : report.gathered().norms()) norms.push_back(FromProto(norm));
      const auto vote_norms = job_->steps->OnGathered(
          scheduler::Attempt(report.gathered().attempt()), lane, std::move(norms));
      if (!vote_norms.has_value()) return;
      v1::Vote& vote = *message.mutable_vote();
      vote.set_attempt(report.gathered().attempt());
      vote.set_node(options_.node);
      vote.set_plan_digest(job_->plan->digest);
      for (const scheduler::UnitNorm& norm : *vote_norms) *vote.add_norms() = ToProto(norm);
      for (int32_t i = 0; i < options_.lanes; ++i) {
        const std::vector<int32_t>& units = job_->lanes[scheduler::LaneIndex(i)].non_finite;
        vote.mutable_non_finite()->Add(units.begin(), units.end());
      }
      fault::FaultPoint("daemon.vote");
      Tell(std::move(message));
      fault::FaultPoint("daemon.vote.sent");
      return;
    }
    case Kind::kPublished:
      return HandleLanePublished(lane, report.published());
    case Kind::kAttached:
      for (auto& [id, session] : sessions_) {
        if (session.rank != report.attached().rank() ||
            session.incarnation != report.attached().incarnation()) {
          continue;
        }
        session.lanes_attached.insert(lane.value());
        if (!report.attached().error().empty()) {
          session.attach_error =
              Error(absl::StatusCode::kInvalidArgument, "ARENA_INVALID",
                    Say("lane ", Named("lane", lane.value()), " cannot map the memory of rank ",
                        Named("rank", session.rank), ": ", report.attached().error()));
        }
      }
      if (job_->lanes.OnMapped(report.attached().rank(), lane)) TellPlanReady();
      mutex_.Changed();
      return;
    case Kind::kUnitIo:
      unit_answers_[report.unit_io().request()] = report.unit_io().error();
      if (!report.unit_io().error().empty()) {
        log::Error("state was not transferred", {{"job", job_->name},
                                                 {"epoch", epoch_},
                                                 {"lane", lane.value()},
                                                 {"what", report.unit_io().error()}});
      }
      mutex_.Changed();
      return;
    case Kind::kCopied:
      return HandleCopied(lane, report.copied());
    case Kind::kStateLoaded:
      return HandleStateLoaded(lane, report.state_loaded());
    case Kind::kPong:
      return HandlePong(lane, report.pong());
    case Kind::kFailed:
      log::Error("lane failed", {{"job", job_->name},
                                 {"epoch", epoch_},
                                 {"lane", lane.value()},
                                 {"what", report.failed().what()}});
      return;
    default:
      return;
  }
}

void Daemon::OnLaneGone(uint64_t generation, scheduler::LaneIndex lane,
                        const std::string& last_words) {
  StateLock lock(mutex_);
  if (generation != generation_ || job_ == nullptr || !job_->lanes.OnGone(lane)) return;
  job_->snapshots.Abandon(absl::StrCat("lane ", lane.value(), " ended: ", last_words));
  const int32_t id = job_->lanes[lane].id.value();
  log::Error("lane lost", {{"job", job_->name},
                           {"epoch", epoch_},
                           {"step", LastCommitted()},
                           {"lane", id},
                           {"what", last_words}});
  v1::MemberMessage message;
  message.mutable_lane_lost()->set_lane(id);
  message.mutable_lane_lost()->set_detail(last_words);
  message.mutable_lane_lost()->set_epoch(job_->lanes.epoch());
  // The coordinator says what comes of it: other lanes, or that this was once too often, or that a
  // job that had not begun is refused.
  Tell(std::move(message));
}

void Daemon::Tick() {
  std::optional<LaneHost::Reaper> reaper;
  {
    StateLock lock(mutex_);
    ForgetRefusedOpens(std::chrono::steady_clock::now());
    if (coordinator_ != nullptr) {
      Perform(coordinator_->OnTick(std::chrono::steady_clock::now()));
      Pump();
    }
    EndBrokenJob();
    WatchLanes(std::chrono::steady_clock::now());
    WatchDisks(std::chrono::steady_clock::now());
    TellProgress(std::chrono::steady_clock::now());
    reaper = lane_host_.BeginReaping();
  }
  reaper->Wait(std::chrono::steady_clock::now() + kReaped);
  StateLock lock(mutex_);
  lane_host_.EndReaping(*std::move(reaper));
  StartNewLanes();
}

}  // namespace dmuond::server
