#include "server/daemon/core.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "scheduler/convert/convert.h"
#include "scheduler/convert/registrations.h"
#include "scheduler/job/save_request.h"
#include "scheduler/limits.h"
#include "scheduler/shown_pid.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/daemon/node_view.h"

namespace dmuond::server {
namespace {

// So long lanes that end are waited for before the place is looked at again.
constexpr std::chrono::milliseconds kReaped{100};
constexpr std::chrono::seconds kLookWaits{1};  // for a picture of the node that is not old
constexpr uint32_t kAttemptsOfAPlace = (uint64_t{1} << 32) / scheduler::kPlacesMax;

scheduler::TimePoint Now() { return std::chrono::steady_clock::now(); }

scheduler::NodeJobOptions JobOptions(const DaemonOptions& options) {
  scheduler::NodeJobOptions job;
  job.node = options.node;
  job.nodes = options.nodes;
  job.lanes = options.lanes;
  job.snapshots = options.storage != nullptr;
  job.watch = {options.lane_timeout, options.coordinator.step.work_timeout()};
  job.register_timeout = options.coordinator.register_timeout;
  job.session_linger = options.coordinator.step.session_linger;
  job.job_uids = options.coordinator.job_uids;
  return job;
}

JobLanes::Options LaneOptions(const DaemonOptions& options, const NodeDevice& device) {
  return {.host = {.binary = options.lane_binary,
                   .device = &device,
                   .lanes = options.lanes,
                   .lock = options.lock},
          .threads_per_lane = options.threads_per_lane,
          .rail_address = options.rail_address,
          .rail_timeout = options.rail_timeout,
          .snapshot_staging_bytes = options.snapshot_staging_bytes};
}

// Fault points of what a daemon is about to hear, as coordinator and as member.
void AboutToHear(const v1::MemberMessage& message) {
  if (message.has_registration()) fault::FaultPoint("coordinator.registration");
  if (message.reports().submitted_size() > 0) fault::FaultPoint("coordinator.submission");
  if (message.has_vote()) fault::FaultPoint("coordinator.vote");
}
void AboutToHear(const v1::CoordinatorMessage& message) {
  if (message.has_open()) fault::FaultPoint("daemon.open");
  if (message.has_decision()) fault::FaultPoint("daemon.decision");
  if (message.has_republish()) fault::FaultPoint("daemon.republish");
  if (message.has_reform()) fault::FaultPoint("daemon.reform");
  if (message.has_roll_back()) fault::FaultPoint("daemon.rollback");
}

}  // namespace

Core::Core(DaemonOptions daemon_options, NodeDevice& node_device, int32_t of_place)
    : options(std::move(daemon_options)),
      place(of_place),
      device(node_device),
      job(JobOptions(options)),
      reports(/*gathers=*/options.nodes > 1),
      lanes(LaneOptions(options, device),
            {.on_report =
                 [this](uint64_t generation, scheduler::LaneIndex lane,
                        const v1::LaneReport& report) { OnLaneReport(generation, lane, report); },
             .on_gone =
                 [this](uint64_t generation, scheduler::LaneIndex lane,
                        const std::string& last_words) {
                   OnLaneGone(generation, lane, last_words);
                 }}),
      memory({.node = options.node,
              .lanes = options.lanes,
              .job_memory_bytes = options.job_memory_bytes,
              .host_copies = options.storage != nullptr},
             device, planner, [this](const auto& event) { Enter(event); }),
      disks({.node = options.node,
             .keep = options.snapshot_keep,
             .timeout = options.snapshot_timeout,
             .group = options.group_name,
             .sweeps =
                 options.node == 0 && place == 0 && options.snapshots_of_ended_jobs.count() > 0},
            options.storage,
            {.enter = [this](const auto& event) { Enter(event); },
             .tell = [this](v1::MemberMessage message)
                         DMUOND_REQUIRES(mutex) { Tell(std::move(message)); },
             .on_written = [this](uint64_t attempt,
                                  const absl::StatusOr<std::vector<v1::SnapshotFile>>& files)
                               DMUOND_REQUIRES(mutex) { Do(job.OnWritten(attempt, files)); },
             .on_restored =
                 [this](absl::StatusOr<scheduler::NodeJob::Restored> restored,
                        const std::optional<storage::SnapshotId>& older) DMUOND_REQUIRES(mutex) {
                   Do(job.OnRestored(Now(), std::move(restored), older));
                 },
             .on_hangs = [this](const std::string& how)
                             DMUOND_REQUIRES(mutex) { Do(job.OnDiskHangs(how)); },
             .changed = [this]() DMUOND_REQUIRES(mutex) { mutex.Changed(); }}) {
  if (options.node == 0) {
    scheduler::GroupJobOptions of_group = options.coordinator;
    of_group.attempts_from = static_cast<uint32_t>(place) * kAttemptsOfAPlace;
    coordinator = std::make_unique<scheduler::GroupJob>(of_group);
  }
  StateLock lock(mutex);
  TakeView();
}

Core::~Core() {
  StateLock lock(mutex);
  disks.AbandonCopies("the daemon ends");
  disks.StopRestoring();
}

// ---- the turn ----

void Core::Enter(const std::function<void()>& event) {
  StateLock lock(mutex);
  event();
}

void Core::Tell(v1::MemberMessage message) {
  Queue(reports.Pass(Now(), std::move(message)));
  Pump();
}

// Costs one comparison where nothing has changed. A node that lacks the memory goes on without a
// record.
void Core::WriteRecord() {
  if (recorded_ == job.record_version() || record_waits_) return;
  const absl::Status written = record.Write(job);
  if (written.ok()) {
    recorded_ = job.record_version();
    if (record_lacks_) log::Info("the job's record is kept again");
  } else {
    recorded_.reset();
    record_waits_ = true;
    if (!record_lacks_) {
      log::Error(
          "the job's record cannot be kept: no successor of this process could go on from it",
          {{"job", job.exists() ? job.name() : ""}, {"what", written}});
    }
  }
  record_lacks_ = !written.ok();
}

void Core::Queue(scheduler::OutgoingReports::Messages messages) {
  std::move(messages.begin(), messages.end(), std::back_inserter(told_));
}

void Core::OnDue() {
  StateLock lock(mutex);
  if (coordinator != nullptr) Do(coordinator->OnDue(Now()));
  Queue(reports.OnDue(Now()));
  Pump();
}

void Core::CoordinatorHears(int32_t node, const v1::MemberMessage& message) {
  AboutToHear(message);
  Do(coordinator->OnMessage(Now(), node, message));
}

void Core::Pump() {
  if (pumping_) return;
  pumping_ = true;
  while (!told_.empty() || !heard_.empty()) {
    if (!heard_.empty()) {
      const v1::CoordinatorMessage message = std::move(heard_.front());
      heard_.pop_front();
      Handle(message);
      continue;
    }
    v1::MemberMessage message = std::move(told_.front());
    told_.pop_front();
    if (coordinator != nullptr) {
      CoordinatorHears(options.node, message);
    } else {
      message.set_place(place);
      peers->SendToCoordinator(message);
    }
    if (message.has_vote()) fault::FaultPoint("daemon.vote.sent");
  }
  pumping_ = false;
  lanes.SendTurn();
  if (std::exchange(decided_, false)) {
    fault::FaultPoint("daemon.decision.to_lanes");
    fault::FaultPoint("daemon.decision.known");
  }
  SendToMembers();
  for (const auto due :
       {reports.due(), coordinator != nullptr ? coordinator->due() : std::nullopt}) {
    if (due.has_value()) due_timer_.Set(*due);
  }
}

void Core::Handle(const v1::CoordinatorMessage& message) {
  AboutToHear(message);
  using Kind = v1::CoordinatorMessage::MessageCase;
  switch (message.message_case()) {
    case Kind::kFindSnapshot:
      return disks.Find(message.find_snapshot());
    case Kind::kWriteManifest:
      return disks.WriteManifest(message.write_manifest(), JobForDisks());
    case Kind::kDiscard:
      return disks.Discard(message.discard());
    case Kind::kCheck:
      return BeginCheck(message.check());
    case Kind::kCheckDone:
      return OnCheckDone(message.check_done());
    case Kind::kDecision: {
      const scheduler::StepMember* steps = job.exists() ? job.steps() : nullptr;
      decided_ = decided_ || (steps != nullptr &&
                              message.decision().attempt() >= steps->open().attempt.value());
      return Do(job.OnMessage(Now(), message));
    }
    default:
      break;
  }
  if (message.has_open() && job.exists() && job.plan() != nullptr) {
    reports.OnOpen(Now(), FromProto(message.open()));
  }
  Do(job.OnMessage(Now(), message));
  if (message.has_reform() || message.has_roll_back() || message.has_new_epoch()) {
    newest_epoch.store(job.epoch());
  }
}

SnapshotDisks::Job Core::JobForDisks() const {
  if (!job.exists()) return {};
  return {.name = job.name(),
          .incarnation = job.wire().job_incarnation(),
          .planned = {job.inputs(), job.plan()},
          .groups = AnyOf(job.wire()).groups(),
          .host = memory.host()};
}

// ---- events ----

void Core::OnFormed(uint32_t epoch) {
  StateLock lock(mutex);
  newest_epoch.store(epoch);
  reports.Forget();
  if (coordinator != nullptr) Do(coordinator->OnFormed(Now(), epoch));
  Do(job.OnFormed(Now(), epoch));
  Do(departure.OnFormed(job));
}

void Core::OnMemberMessage(int32_t node, const v1::MemberMessage& message) {
  StateLock lock(mutex);
  CoordinatorHears(node, message);
}

void Core::OnMemberGone(int32_t node, const std::string& why) {
  StateLock lock(mutex);
  ++counters.members_gone;
  Do(coordinator->OnMemberGone(Now(), node, why));
  Do(job.OnBroken(Now(), absl::StrCat("the daemon of node ", node, " is gone: ", why)));
}

void Core::OnCoordinatorMessage(const v1::CoordinatorMessage& message) {
  StateLock lock(mutex);
  heard_.push_back(message);
  Pump();
}

void Core::OnCoordinatorGone(const std::string& why) {
  StateLock lock(mutex);
  ++counters.coordinator_gone;
  Do(job.OnBroken(Now(), absl::StrCat("the coordinating daemon is gone: ", why)));
}

void Core::OnAttachGone(AttachId id) {
  StateLock lock(mutex);
  const std::optional<uint64_t> session = clients.OnAttachGone(id);
  if (!session.has_value()) return;
  const scheduler::RankTable::Session* ended = job.ranks().Find(*session);
  if (ended == nullptr) return;
  Do(job.OnTrainerGone(*session, absl::StrCat("the trainer of rank ", ended->rank, " (",
                                              scheduler::SayPid(ended->pid).text,
                                              ") is gone without closing its session")));
}

void Core::OnLaneReport(uint64_t generation, scheduler::LaneIndex lane,
                        const v1::LaneReport& report) {
  StateLock lock(mutex);
  if (generation != lanes.generation() || !job.exists()) return;
  if (report.has_unit_io()) {
    unit_answers[report.unit_io().request()] = report.unit_io().error();
    if (!report.unit_io().error().empty()) {
      log::Error("state was not transferred", {{"job", job.name()},
                                               {"epoch", job.epoch()},
                                               {"lane", lane.value()},
                                               {"what", report.unit_io().error()}});
    }
    mutex.Changed();
  }
  if (report.has_update_copied()) {
    const auto wanted = update_copies.find(report.update_copied().request());
    if (wanted != update_copies.end()) wanted->second = report.update_copied();
    mutex.Changed();
  }
  if (report.has_checked()) return OnLaneChecked(lane, report.checked());
  if (report.has_ready()) lanes.KeepTuning(lane, report.ready().tuning());
  if (report.has_pong()) lanes.KeepSilence(lane, report.pong().rail_silent_ms());
  if (traces.has_value() && report.published().has_trace()) {
    traces->push_back(report.published().trace());
    mutex.Changed();
  }
  const bool restores = job.restores();
  const scheduler::node::Actions actions = job.OnLaneReport(Now(), lane, report);
  if (restores && !job.restores()) fault::FaultPoint("daemon.restored");
  Do(actions);
}

void Core::OnLaneGone(uint64_t generation, scheduler::LaneIndex lane,
                      const std::string& last_words) {
  StateLock lock(mutex);
  if (generation != lanes.generation()) return;
  if (job.exists() && static_cast<size_t>(lane.value()) < job.lanes().size() &&
      job.lanes()[lane].state != scheduler::LaneSet::State::kCondemned) {
    ++counters.lanes_ended;
  }
  Do(job.OnLaneGone(Now(), lane, last_words));
}

void Core::Tick() {
  StateLock lock(mutex);
  const scheduler::TimePoint now = Now();
  record_waits_ = false;
  clients.OnTick(now);
  if (coordinator != nullptr) Do(coordinator->OnTick(now));
  scheduler::NodeJob::Sight sight;
  sight.lanes_end = lanes.host().ending();
  sight.processor_time = [this](scheduler::LaneIndex lane)
                             DMUOND_REQUIRES(mutex) { return lanes.host().ProcessorTime(lane); };
  sight.pid = [this](scheduler::LaneIndex lane)
                  DMUOND_REQUIRES(mutex) { return static_cast<int64_t>(lanes.host().pid(lane)); };
  if (const PrepareProgress* preparing = memory.preparing(); preparing != nullptr) {
    sight.prepared_bytes = preparing->done;
    sight.planned = preparing->planned;
  }
  sight.read_bytes = disks.read_bytes();
  Do(job.OnTick(now, sight));
  disks.OnTick(now, job.exists() ? job.name() : "", job.epoch());
  job.SetDiskHangs(disks.HangOfWrites());
  LookForPlaces();
  TakeView();
}

void Core::LookForPlaces() {
  if (lanes.host().ending()) return reap_timer_.Set(Now());
  Do(job.OnPlacesFree());
  mutex.Changed();
}

void Core::Reap() {
  std::optional<LaneHost::Reaper> reaper;
  {
    StateLock lock(mutex);
    reaper = lanes.host().BeginReaping();
  }
  reaper->Wait(Now() + kReaped);
  StateLock lock(mutex);
  lanes.host().EndReaping(*std::move(reaper));
  LookForPlaces();
}

// ---- for who only looks ----

void Core::TakeView() {
  auto taken = std::make_shared<const NodeView>(ViewOf(*this));
  // The picture before may be the last that holds a plan. It is destroyed after this lock is given
  // up.
  MutexLock lock(view_mutex_);
  view_.swap(taken);
  view_taken_.NotifyAll();
}

Core::Seen Core::LookAfter(Deadline asked) {
  MutexLock lock(view_mutex_);
  while (view_->taken < asked && view_taken_.WaitUntil(view_mutex_, asked + kLookWaits)) {
  }
  if (view_->taken >= asked) return {view_};
  return {view_, std::chrono::duration_cast<std::chrono::milliseconds>(Now() - view_->taken)};
}

// ---- for calls ----

absl::StatusOr<bool> Core::Wait(const std::function<bool()>& ready, Deadline deadline,
                                const Cancelled& cancelled) {
  // A caller that hangs up is noticed within this time.
  constexpr std::chrono::milliseconds kLookAtCaller{250};
  bool is_ready = ready();
  while (!is_ready) {
    const auto now = Now();
    if (now >= deadline) return false;
    mutex.WaitUntil(ready, std::min(deadline, now + kLookAtCaller));
    is_ready = ready();
    if (!is_ready && cancelled()) return absl::CancelledError("the caller has gone");
  }
  return true;
}

StateMutex::LateId Core::WaitLate(StateMutex::LateWait wait) {
  late_timer_.Set(wait.deadline);
  return mutex.WaitLate(std::move(wait));
}

void Core::OnOverdue() {
  StateLock lock(mutex);
  if (const auto next = mutex.EndOverdue(Now()); next.has_value()) late_timer_.Set(*next);
}

absl::Status Core::WaitUntilPublished(const Cancelled& cancelled) {
  constexpr std::chrono::seconds kPublishTimeout{60};
  ++waiting_for_published;
  absl::StatusOr<bool> published = Wait(
      [this]() DMUOND_REQUIRES(mutex) { return job.Published() || !job.WhyNoLanesCome().ok(); },
      Now() + kPublishTimeout, cancelled);
  --waiting_for_published;
  if (!published.ok()) return published.status();
  if (absl::Status failure = job.failure(); !failure.ok()) return failure;
  if (job.Published()) return absl::OkStatus();
  if (absl::Status over = job.WhyNoLanesCome(); !over.ok()) return over;
  return Error(absl::StatusCode::kDeadlineExceeded, "LANE_LOST",
               "the lanes have not published the last step in time");
}

absl::StatusOr<Client*> Core::Find(const v1::SessionKey& key) {
  return clients.Find(key, job.leaves());
}

absl::StatusOr<Client*> Core::FindGoingOn(const v1::SessionKey& key) {
  absl::StatusOr<Client*> found = Find(key);
  if (!found.ok()) return found.status();
  if (absl::Status failure = job.failure(); !failure.ok()) return failure;
  absl::Status back = scheduler::NodeJob::CheckNotRolledBack(SessionOf(**found));
  if (!back.ok()) return back;
  return *found;
}

absl::StatusOr<Client*> Core::FindPusher(const v1::SessionKey& key) {
  absl::StatusOr<Client*> found = FindGoingOn(key);
  if (!found.ok()) return found.status();
  if (absl::Status attached = job.CheckAttached(SessionOf(**found)); !attached.ok()) {
    return attached;
  }
  return *found;
}

absl::Status Core::Read(const SnapshotDisks::Work& work, const Cancelled& cancelled) {
  auto done = std::make_shared<bool>(false);
  auto unwanted = std::make_shared<std::atomic<bool>>(false);
  disks.Read(work, unwanted, [this, done]() DMUOND_REQUIRES(mutex) {
    *done = true;
    mutex.Changed();
  });
  absl::StatusOr<bool> ended =
      Wait([&]() DMUOND_REQUIRES(
               mutex) { return *done || disks.reads() == nullptr || disks.reads()->hangs(); },
           Deadline::max(), cancelled);
  unwanted->store(true);
  if (!ended.ok()) return ended.status();
  if (*done) return absl::OkStatus();
  if (disks.reads() == nullptr) {
    return Error(absl::StatusCode::kUnavailable, "DRAINING", "this daemon is leaving");
  }
  return disks.Hangs(*disks.reads());
}

absl::StatusOr<v1::SnapshotDone> Core::SaveNow(const Cancelled& cancelled,
                                               const std::function<absl::Status()>& allowed) {
  if (options.storage == nullptr) {
    return Error(absl::StatusCode::kFailedPrecondition, "NO_SNAPSHOTS",
                 "this daemon has no --snapshot_dir: no snapshots are made");
  }
  if (!job.exists() || job.plan() == nullptr || !job.HasOrGetsState()) {
    return Error(absl::StatusCode::kFailedPrecondition, "JOB_HAS_NO_STATE",
                 "no job has state here: there is nothing to save");
  }
  scheduler::SaveRequest request(job);
  for (;;) {
    scheduler::node::Actions actions;
    auto done = request.Advance(job, actions);
    if (done.has_value()) return *std::move(done);
    Do(std::move(actions));
    absl::StatusOr<bool> news =
        Wait([&]() DMUOND_REQUIRES(mutex) { return request.HasNews(job) || !allowed().ok(); },
             Deadline::max(), cancelled);
    if (!news.ok()) return news.status();
    if (absl::Status may = allowed(); !may.ok()) return may;
  }
}

}  // namespace dmuond::server
