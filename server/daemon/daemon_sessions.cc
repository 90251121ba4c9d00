// Sessions: Hello, OpenSession, RegisterLayout, CloseSession, and the end of a trainer.
#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "dmuond/fault/fault_point.h"
#include "scheduler/convert/convert.h"
#include "scheduler/convert/registrations.h"
#include "scheduler/job/refusals.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/daemon/calls/checked_layout.h"
#include "server/daemon/daemon.h"
#include "server/version.h"

namespace dmuond::server {
namespace {

constexpr size_t kJobNameMax = 128;
constexpr size_t kLaunchMax = 128;
constexpr size_t kEndJobMax = 1024;
constexpr int32_t kWorldMax = 1 << 20;
// Longer than clients repeat a call.
constexpr std::chrono::seconds kRefusalKept{60};

absl::Status RankMoved(const std::string& job, int32_t rank, int32_t home, int32_t node) {
  return Error(absl::StatusCode::kFailedPrecondition, "RANK_MOVED",
               Say("rank ", Named("rank", rank), " of job '", Named("job", job),
                   "' belongs to node ", Named("home_node", home), ", this is node ",
                   Named("node", node), ": start its replacement there"));
}

bool ValidJobName(const std::string& name) {
  if (name.empty() || name.size() > kJobNameMax) return false;
  return std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '.' || c == '_' || c == '-';
  });
}

absl::Status CheckOpenSession(const v1::OpenSessionRequest& request, const DaemonOptions& options) {
  if (!v1::OpenSessionRequest::Resume_IsValid(request.resume())) {
    return Error(
        absl::StatusCode::kInvalidArgument, "RESUME_INVALID",
        Say("rank ", Named("rank", request.rank()), " of job '", Named("job", request.job()),
            "' asks for resume ", Named("resume", static_cast<int>(request.resume())),
            "; known are 1 (NEVER), 2 (IF_PRESENT), 3 (REQUIRE) and 4 (DISCARD)"));
  }
  const bool discards = request.resume() == v1::OpenSessionRequest::RESUME_DISCARD;
  if (request.launch().size() > kLaunchMax ||
      (discards && request.world_size() > 1 && request.launch().empty())) {
    return Error(
        absl::StatusCode::kInvalidArgument, "LAUNCH_INVALID",
        Say("rank ", Named("rank", request.rank()), " of job '", Named("job", request.job()),
            "' has a launch of ", Named("launch_bytes", request.launch().size()),
            " bytes; with discard and more than one rank it has 1 to ",
            Named("launch_bytes_max", kLaunchMax),
            ": set DMUOND_LAUNCH to one value on all ranks of a start"));
  }
  if (!ValidJobName(request.job())) {
    return Error(absl::StatusCode::kInvalidArgument, "JOB_NAME_INVALID",
                 Say("job name '", Named("job", request.job()),
                     "': 1 to 128 letters, digits, '.', '_' or '-' are allowed"));
  }
  if (request.world_size() < 1 || request.world_size() > kWorldMax) {
    return Error(absl::StatusCode::kInvalidArgument, "RANK_OUT_OF_RANGE",
                 Say("world_size is ", Named("world_size", request.world_size()),
                     ", allowed: 1 to ", Named("world_size_max", kWorldMax)));
  }
  if (request.rank() < 0 || request.rank() >= request.world_size()) {
    return Error(absl::StatusCode::kInvalidArgument, "RANK_OUT_OF_RANGE",
                 Say("rank ", Named("rank", request.rank()), " in a world of ",
                     Named("world_size", request.world_size())));
  }
  if (request.home_lane() < -1 || request.home_lane() >= options.lanes) {
    return Error(absl::StatusCode::kInvalidArgument, "LANE_OUT_OF_RANGE",
                 Say("rank ", Named("rank", request.rank()), " names home lane ",
                     Named("home_lane", request.home_lane()), "; this node has lanes 0 to ",
                     Named("last_lane", options.lanes - 1)));
  }
  if (!options.token.empty() && request.token() != options.token) {
    return Error(
        absl::StatusCode::kPermissionDenied, "TOKEN_WRONG",
        Say("rank ", Named("rank", request.rank()), " of job '", Named("job", request.job()),
            "' carries the wrong token: DMUOND_TOKEN_FILE names the file that has the right "
            "one"));
  }
  return absl::OkStatus();
}

// By parameter of the registration: its index in the job's layout, which has every name of it.
std::vector<int32_t> JobParameters(const scheduler::Registration& layout,
                                   const scheduler::PlanInputs& inputs) {
  absl::flat_hash_map<absl::string_view, int32_t> index;
  const std::vector<scheduler::Parameter>& parameters = inputs.layout.parameters;
  index.reserve(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    index.emplace(parameters[i].name, static_cast<int32_t>(i));
  }
  std::vector<int32_t> job_parameter;
  job_parameter.reserve(layout.parameters.size());
  for (const scheduler::Parameter& parameter : layout.parameters) {
    job_parameter.push_back(index.at(parameter.name));
  }
  return job_parameter;
}

v1::RegisterLayoutReply ReplyOf(const scheduler::PlanInputs& inputs, const scheduler::Plan& plan,
                                const std::vector<int32_t>& job_parameter) {
  v1::RegisterLayoutReply reply;
  for (v1::RoutingRow& row : RoutingRows(inputs.layout, plan)) {
    *reply.add_routing() = std::move(row);
  }
  for (const int32_t parameter : job_parameter) {
    reply.add_parameter_bucket(plan.parameter_bucket[parameter]);
  }
  reply.set_buckets(plan.buckets);
  reply.set_plan_digest(plan.digest);
  reply.set_makespan_us(plan.quality.makespan_us);
  reply.set_lower_bound_us(plan.quality.lower_bound_us);
  reply.set_imbalance(plan.quality.imbalance);
  return reply;
}

}  // namespace

absl::Status Daemon::WaitUntilVacant(const v1::OpenSessionRequest& request, pid_t successor,
                                     const Cancelled& cancelled) {
  // A launcher may be faster than the news of its child's end.
  constexpr std::chrono::seconds kNewsTravel{1};
  const auto now = std::chrono::steady_clock::now();
  absl::StatusOr<bool> gone = Wait(
      [&]() DMUOND_REQUIRES(mutex_) {
        if (job_ == nullptr || job_->name != request.job()) return true;
        return std::none_of(sessions_.begin(), sessions_.end(),
                            [&](const auto& entry) { return entry.second.rank == request.rank(); });
      },
      now + kNewsTravel, cancelled);
  if (!gone.ok()) return gone.status();
  const auto vacancy = [&]() DMUOND_REQUIRES(mutex_) -> const Vacancy* {
    if (job_ == nullptr) return nullptr;
    const auto found = job_->vacancies.find(request.rank());
    return found == job_->vacancies.end() || found->second.pid == successor ? nullptr
                                                                            : &found->second;
  };
  gone = Wait(
      [&]() DMUOND_REQUIRES(mutex_) {
        const Vacancy* left = vacancy();
        return left == nullptr || !Runs(left->process);
      },
      now + options_.coordinator.register_timeout, cancelled);
  if (!gone.ok()) return gone.status();
  if (*gone) return absl::OkStatus();
  return scheduler::PredecessorRuns(request.rank(), vacancy()->pid);
}

absl::StatusOr<v1::HelloReply> Daemon::Hello(const v1::HelloRequest& request) {
  if (request.version_min() > kProtocolVersion || request.version_max() < kProtocolVersion) {
    return Error(
        absl::StatusCode::kFailedPrecondition, "VERSION_MISMATCH",
        Say("the client '", Named("client", request.client()), "' speaks protocol versions ",
            Named("version_min", request.version_min()), " to ",
            Named("version_max", request.version_max()), ", this daemon (",
            Named("server", kBuildVersion), ") speaks ", Named("server_version", kProtocolVersion),
            ": update ", request.version_max() < kProtocolVersion ? "the client" : "the daemon"));
  }
  v1::HelloReply reply;
  reply.set_version(kProtocolVersion);
  reply.set_features(request.features() & kFeatures);
  reply.set_server(absl::StrCat("dmuond ", kBuildVersion));
  reply.set_lanes(options_.lanes);
  reply.set_device_type("cpu");
  return reply;
}

absl::StatusOr<v1::OpenSessionReply> Daemon::OpenSession(const v1::OpenSessionRequest& request,
                                                         const Cancelled& cancelled) {
  StateLock lock(mutex_);
  // The nonce tells a call that is repeated: every attach socket has its own.
  absl::StatusOr<bool> alone =
      Wait([&]() DMUOND_REQUIRES(mutex_) { return !opening_.contains(request.nonce()); },
           Deadline::max(), cancelled);
  if (!alone.ok()) return alone.status();
  const std::string bytes = request.SerializeAsString();
  for (const auto& [id, session] : sessions_) {
    if (session.request == bytes) return session.opened;
  }
  for (const auto& [id, refused] : refused_opens_) {
    if (refused.nonce == request.nonce()) return refused.status;
  }
  absl::StatusOr<AttachPeer> peer = attach_->Claim(request.nonce());
  if (!peer.ok()) return peer.status();
  opening_.insert(request.nonce());
  absl::StatusOr<v1::OpenSessionReply> opened = OpenClaimed(request, *peer, cancelled);
  opening_.erase(request.nonce());
  if (!opened.ok()) KeepRefusal(peer->id, request.nonce(), opened.status());
  mutex_.Changed();
  return opened;
}

// Who is refused starts over with a new socket. This one stays until its other end is closed: who
// has lost the refusal asks again, and must not take the daemon for gone.
void Daemon::KeepRefusal(AttachId attach, const std::string& nonce, const absl::Status& why) {
  refused_opens_[attach] = {nonce, why, std::chrono::steady_clock::now() + kRefusalKept};
}

// Whether a replacement can be told where the job is: what the predecessor's last attempt has come
// to has been heard, in this epoch, and nothing can be committed without the rank any more.
bool Daemon::KnowsItsStep(int32_t rank) const {
  if (!job_->failed.ok() || !job_->steps.has_value()) return true;
  const scheduler::Attempt open = job_->steps->open().attempt;
  const auto vacancy = job_->vacancies.find(rank);
  return !job_->reforming && scheduler::EpochOf(open).value() == epoch_ &&
         (vacancy == job_->vacancies.end() || open > vacancy->second.attempt);
}

absl::Status Daemon::NotFormed() const {
  return Error(absl::StatusCode::kUnavailable, "GROUP_NOT_FORMED",
               Say("the group of ", Named("nodes", options_.nodes),
                   " daemons has not formed; `dmuonctl status` on node 0 says who is missing"));
}

// Why a session has to wait for longer than its caller can be kept.
absl::Status Daemon::NotReadyToOpen(int32_t rank) const {
  const auto refuse = [rank, &job = job_->name](const char* why) {
    return Error(absl::StatusCode::kUnavailable, "GROUP_NOT_READY",
                 Say("rank ", Named("rank", rank), " of job '", Named("job", job),
                     "' cannot begin yet: ", Named("awaited", why), "; ask again"));
  };
  if (job_->abandoned) return refuse("a job that was lost still has trainers");
  if (job_->ending) return refuse("the last state of the job is being saved");
  if (!job_->failed.ok()) return job_->failed;
  if (job_->reforming) return refuse("lanes are being replaced");
  return refuse("the group has to form anew, or to say what became of the rank's last attempt");
}

absl::StatusOr<v1::OpenSessionReply> Daemon::OpenClaimed(const v1::OpenSessionRequest& request,
                                                         const AttachPeer& peer,
                                                         const Cancelled& cancelled) {
  absl::Status checked = CheckOpenSession(request, options_);
  if (!checked.ok()) return checked;
  auto deadline = std::chrono::steady_clock::now() + options_.coordinator.register_timeout;
  absl::StatusOr<bool> formed = Wait(
      [this]() DMUOND_REQUIRES(mutex_) { return epoch_ != 0 || draining_; }, deadline, cancelled);
  if (!formed.ok()) return formed.status();
  if (!*formed) return NotFormed();
  if (absl::Status vacant = WaitUntilVacant(request, peer.pid, cancelled); !vacant.ok()) {
    return vacant;
  }
  std::optional<Restorable> resume;
  for (;;) {
    // A job that was lost ends with its last session; who starts it again may be faster.
    absl::StatusOr<bool> ended = Wait(
        [&]() DMUOND_REQUIRES(mutex_) {
          if ((draining_ && epoch_ == 0) || MustDiscard(request)) return true;
          // Of a session that begins while the group is broken nobody would hear.
          if (job_ == nullptr) return epoch_ != 0;
          // What a rank gave with the step that the job goes back to comes with the snapshot.
          return !job_->abandoned && !job_->ending && !IsRestoring() &&
                 KnowsItsStep(request.rank());
        },
        deadline, cancelled);
    if (!ended.ok()) return ended.status();
    if (!*ended && IsRestoring()) {
      // Bytes come, or the coordinator ends it.
      deadline = std::chrono::steady_clock::now() + options_.coordinator.register_timeout;
      continue;
    }
    if (!*ended) return job_ == nullptr ? NotFormed() : NotReadyToOpen(request.rank());
    if (MustDiscard(request) && !draining_) {
      if (absl::Status ends = DiscardOlder(request, cancelled); !ends.ok()) return ends;
      continue;
    }
    const bool anew = request.resume() == v1::OpenSessionRequest::RESUME_DISCARD;
    if (job_ != nullptr || draining_ || anew) break;
    absl::StatusOr<std::optional<Restorable>> newest = FindResume(request.job(), cancelled);
    if (!newest.ok()) return newest.status();
    resume = *std::move(newest);
    // While the disk was read the job may have begun here, and go back; or the group broke.
    if (job_ == nullptr && epoch_ != 0) break;
  }
  if (draining_) {
    return Error(absl::StatusCode::kUnavailable, "DRAINING", "this daemon is leaving");
  }
  if (job_ != nullptr && job_->name != request.job()) {
    return scheduler::OtherJob(job_->name, request.job());
  }
  if (job_ != nullptr && job_->world_size != request.world_size()) {
    return scheduler::WorldDiffers(job_->name, job_->world_size, request.rank(),
                                   request.world_size());
  }
  for (const auto& [id, session] : sessions_) {
    if (session.rank != request.rank()) continue;
    return scheduler::RankTwice(request.job(), request.rank(), session.pid, session.client);
  }
  if (job_ != nullptr && job_->plan != nullptr) {
    const int32_t home = job_->inputs->layout.trainers[request.rank()].node.value();
    if (home != options_.node) return RankMoved(request.job(), request.rank(), home, options_.node);
  }
  // What was found counts for the job that it begins.
  const bool has_state = job_ == nullptr ? resume.has_value() : JobHasState();
  const int64_t last_committed =
      job_ == nullptr && resume.has_value() ? resume->id.step.value() : LastCommitted();
  if (has_state && request.resume() != v1::OpenSessionRequest::RESUME_IF_PRESENT &&
      request.resume() != v1::OpenSessionRequest::RESUME_REQUIRE) {
    return request.resume() == v1::OpenSessionRequest::RESUME_DISCARD
               ? scheduler::LaunchHasState(request.job(), LaunchOf(request), last_committed)
               : scheduler::JobHasState(request.job(), last_committed);
  }
  if (!has_state && request.resume() == v1::OpenSessionRequest::RESUME_REQUIRE) {
    return scheduler::JobHasNoState(request.job());
  }
  if (job_ != nullptr && !job_->failed.ok()) return job_->failed;
  if (job_ != nullptr && job_->has_state && !job_->vacancies.contains(request.rank())) {
    // Every rank has pushed to make the state: this one has closed its session since.
    return Error(
        absl::StatusCode::kUnavailable, "TRAINER_LOST",
        Say("rank ", Named("rank", request.rank()), " has left job '", Named("job", request.job()),
            "' at step ", Named("last_committed_step", job_->steps->last_committed().value()),
            ": a job ends when a rank closes its session; start it again when the other ranks have "
            "ended, or end it now: `dmuonctl job end ",
            request.job(), "`"));
  }

  if (job_ == nullptr) {
    BeginJob(request.job(), request.world_size());
    job_->launch = LaunchOf(request);
    if (resume.has_value()) job_->snapshots.part.set_durable_step(resume->id.step.value());
    job_->snapshots.resume = std::move(resume);
    if (options_.storage == nullptr) {
      log::Warn("no snapshots are made: the job's state goes with this daemon (--snapshot_dir)",
                {{"job", job_->name}});
    }
  }
  const v1::SessionKey key = NewSessionKey(++incarnations_[request.rank()]);
  const uint64_t id = key.session();
  Session& session = sessions_[id];
  session.id = id;
  session.secret = key.secret();
  session.incarnation = key.incarnation();
  session.attach = peer.id;
  session.nonce = request.nonce();
  session.pid = peer.pid;
  session.uid = peer.uid;
  session.process = peer.process;
  session.client = request.client();
  session.rank = request.rank();
  session.home_lane =
      request.home_lane() >= 0 ? request.home_lane() : request.rank() % options_.lanes;
  session.poison = request.poison_parameters();
  session.discards = request.resume() == v1::OpenSessionRequest::RESUME_DISCARD;

  Tell(NewsOfSession(session));
  // A coordinator in this process has answered already; another one answers RegisterLayout.
  if (!session.denied.ok()) {
    const absl::Status denied = session.denied;
    ForgetDenied(id);
    return denied;
  }

  v1::OpenSessionReply reply;
  reply.set_session(id);
  reply.set_secret(session.secret);
  reply.set_incarnation(session.incarnation);
  reply.set_job_incarnation(job_ == nullptr ? 0 : job_->wire.job_incarnation());
  reply.set_has_state(has_state);
  reply.set_last_committed_step(LastCommitted());
  if (const auto step = job_->snapshots.part.durable_step()) reply.set_durable_step(*step);
  reply.set_trainer_state(TrainerStateOf(session.rank));
  reply.set_step_timeout_ms(options_.step_timeout.count());
  reply.set_published_timeout_ms(options_.published_timeout().count());
  reply.set_session_linger_ms(options_.coordinator.step.session_linger.count());
  fault::FaultPoint("daemon.session");
  session.request = request.SerializeAsString();
  session.opened = reply;
  log::Info("session opened", {{"job", request.job()},
                               {"epoch", epoch_},
                               {"rank", absl::StrCat(request.rank())},
                               {"pid", absl::StrCat(peer.pid)},
                               {"client", request.client()}});
  return reply;
}

v1::MemberMessage Daemon::NewsOfSession(const Session& session) const {
  v1::MemberMessage message;
  v1::RankSession& told = *message.mutable_rank_session();
  told.set_rank(session.rank);
  told.set_node(options_.node);
  told.set_job(job_->name);
  told.set_world_size(job_->world_size);
  told.set_incarnation(session.incarnation);
  told.set_pid(session.pid);
  told.set_restore_step(RestoreStep());
  // Once it has a plan the job is its launch's own: what is told again discards nothing.
  told.set_discard(session.discards && !job_->planned());
  told.set_launch(job_->launch);
  if (!job_->planned() && job_->snapshots.resume.has_value()) {
    const v1::SnapshotPlan& before = job_->snapshots.resume->manifest.plan();
    if (before.has_costs()) *told.mutable_costs() = before.costs();
  }
  return message;
}

v1::MemberMessage Daemon::NewsOfAttached(const Session& session) const {
  v1::MemberMessage message;
  v1::RankAttached& attached = *message.mutable_rank_attached();
  attached.set_rank(session.rank);
  attached.set_incarnation(session.incarnation);
  attached.set_epoch(epoch_);
  // Nobody asks a job with state what its ranks have begun with.
  if (job_->has_state) return message;
  attached.mutable_weight_digests()->Add(session.weight_digests.begin(),
                                         session.weight_digests.end());
  attached.set_broadcast(session.broadcast);
  return message;
}

absl::StatusOr<v1::RegisterLayoutReply> Daemon::RegisterLayout(
    const v1::RegisterLayoutRequest& request, const Cancelled& cancelled) {
  v1::Registration registration;
  {
    StateLock lock(mutex_);
    absl::StatusOr<Session*> found = Find(request.key());
    if (!found.ok()) return found.status();
    const Session& session = **found;
    registration.set_rank(session.rank);
    registration.set_node(options_.node);
    registration.set_home_lane(session.home_lane);
    registration.set_job(job_->name);
    registration.set_world_size(job_->world_size);
  }
  // Nobody waits while it is looked at.
  absl::StatusOr<CheckedLayout> checked = CheckLayout(std::move(registration), request);

  StateLock lock(mutex_);
  absl::StatusOr<Session*> found = Find(request.key());
  if (!found.ok()) return found.status();
  Session* session = *found;
  if (!session->denied.ok()) return session->denied;
  // Sent before the caller had read why its last registration was refused: the answer of that one.
  if (request.has_refusals() && request.refusals() < session->refusals) return RefusalOf(*session);
  if (!checked.ok()) return checked.status();
  registration = std::move(checked->wire);
  const int64_t bytes_max = options_.coordinator.peer_message_bytes_max;
  if (options_.nodes > 1 && static_cast<int64_t>(registration.ByteSizeLong()) > bytes_max) {
    return Error(absl::StatusCode::kResourceExhausted, "LAYOUT_TOO_LARGE",
                 Say("what rank ", Named("rank", session->rank), " registers has ",
                     Named("bytes", registration.ByteSizeLong()), " bytes, at most ",
                     Named("limit_bytes", bytes_max),
                     " cross between daemons: a larger --peer_message_bytes_max, on all of them"));
  }
  if (job_->plan != nullptr && session->state == Session::State::kOpen) {
    absl::Status same = CheckReplacement(*session, registration);
    if (!same.ok()) return same;
  }

  const int64_t refusals = session->refusals;
  if (session->state == Session::State::kOpen) {
    session->registration = registration;
    session->layout = std::move(checked->layout);
    session->state = Session::State::kRegistered;
    v1::MemberMessage message;
    *message.mutable_registration() = Pack(std::move(registration));
    Tell(std::move(message));
  } else if (session->registration.SerializeAsString() != registration.SerializeAsString()) {
    return Error(absl::StatusCode::kFailedPrecondition, "LAYOUT_DIFFERS",
                 Say("rank ", Named("rank", session->rank),
                     " has registered another layout before; close the session first"));
  }

  const auto refused = [&]() DMUOND_REQUIRES(mutex_) {
    return (*found)->refusals > refusals || !(*found)->denied.ok();
  };
  // The coordinator's deadline ends the wait; ours, a little later, is for a coordinator that is
  // gone. While memory is made here it watches that something gets done.
  absl::StatusOr<bool> planned = false;
  do {
    planned = Wait(
        [&]() DMUOND_REQUIRES(mutex_) {
          found = Find(request.key());
          return !found.ok() || refused() || !JobFailure().ok() || job_->plan != nullptr;
        },
        std::chrono::steady_clock::now() + options_.coordinator.register_timeout +
            std::chrono::seconds(10),
        cancelled);
  } while (planned.ok() && !*planned && job_->preparing != nullptr);
  if (!planned.ok()) return planned.status();
  if (!found.ok()) return found.status();
  session = *found;
  if (refused()) return session->denied.ok() ? RefusalOf(*session) : session->denied;
  if (absl::Status failure = JobFailure(); !failure.ok()) return failure;
  if (!*planned) {
    return Error(
        absl::StatusCode::kDeadlineExceeded, "RANKS_MISSING",
        "the coordinator has not answered in time: `dmuonctl status` on node 0 says whether "
        "it lives, and who is missing");
  }

  const std::shared_ptr<const scheduler::PlanInputs> inputs = job_->inputs;
  const std::shared_ptr<const scheduler::Plan> plan = job_->plan;
  const scheduler::Registration layout = session->layout;
  // The lock is not held for what has the size of a model.
  mutex_.Unlock();
  std::vector<int32_t> job_parameter = JobParameters(layout, *inputs);
  v1::RegisterLayoutReply reply = ReplyOf(*inputs, *plan, job_parameter);
  mutex_.Lock();
  if (found = Find(request.key()); !found.ok()) return found.status();
  (*found)->job_parameter = std::move(job_parameter);
  return reply;
}

absl::Status Daemon::RefusalOf(const Session& session) {
  return WithMetadata(session.refused, {{"refusals", absl::StrCat(session.refusals)}});
}

absl::Status Daemon::CheckReplacement(const Session& session,
                                      const v1::Registration& registration) {
  const absl::StatusOr<v1::Registration> known = RegistrationOf(job_->wire, session.rank);
  if (!known.ok()) return known.status();
  const v1::Registration& before = *known;
  const auto differs = [&session, &job = job_->name](const std::string& what) {
    return Error(absl::StatusCode::kFailedPrecondition, "LAYOUT_DIFFERS",
                 Say("rank ", Named("rank", session.rank), " replaces a trainer of job '",
                     Named("job", job), "' but registers another ", what,
                     "; start it with the model that the job has, or all ranks with "
                     "DMUOND_RESUME=discard, which begins the job anew"));
  };
  if (before.node() != options_.node) {
    return RankMoved(job_->name, session.rank, before.node(), options_.node);
  }
  if (before.SerializeAsString() == registration.SerializeAsString()) return absl::OkStatus();
  if (before.parameters_size() != registration.parameters_size()) {
    return differs(absl::StrCat("number of parameters: ", registration.parameters_size(),
                                ", before ", before.parameters_size()));
  }
  for (int i = 0; i < before.parameters_size(); ++i) {
    const v1::Parameter& was = before.parameters(i);
    const v1::Parameter& is = registration.parameters(i);
    if (was.SerializeAsString() == is.SerializeAsString()) continue;
    return differs(absl::StrCat("parameter ", i, ": {", is.ShortDebugString(), "}, before {",
                                was.ShortDebugString(), "}"));
  }
  const auto text = [](const auto& messages) {
    std::string all;
    for (const auto& message : messages) absl::StrAppend(&all, message.ShortDebugString(), ";");
    return all;
  };
  if (text(before.fragments()) != text(registration.fragments())) return differs("set of boxes");
  if (text(before.groups()) != text(registration.groups())) return differs("set of groups");
  if (before.bucket_bytes() != registration.bucket_bytes()) {
    return differs(absl::StrCat("bucket_bytes: ", registration.bucket_bytes(), ", before ",
                                before.bucket_bytes()));
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::CloseSessionReply> Daemon::CloseSession(const v1::CloseSessionRequest& request) {
  StateLock lock(mutex_);
  if (const v1::CloseSessionReply* before = closed_.Find(request.key()); before != nullptr) {
    return *before;
  }
  absl::StatusOr<Session*> found = Find(request.key());
  if (!found.ok()) return found.status();
  if (request.end_job().size() > kEndJobMax) {
    return Error(absl::StatusCode::kInvalidArgument, "END_JOB_TOO_LONG",
                 Say("rank ", Named("rank", (*found)->rank), " ends its job for a reason of ",
                     Named("bytes", request.end_job().size()), " bytes; at most ",
                     Named("bytes_max", kEndJobMax), " are possible"));
  }
  v1::CloseSessionReply reply;
  if (job_->steps.has_value()) {
    reply.set_last_committed_step(job_->steps->last_committed().value());
  }
  const uint64_t id = (*found)->id;
  const int32_t rank = (*found)->rank;
  closed_.Keep(request.key(), reply);
  if (!request.end_job().empty()) {
    TellEndJob(absl::StrCat("rank ", rank, " has ended it: ", request.end_job()));
  }
  RemoveSession(id, /*closed=*/true, absl::StrCat("rank ", rank, " closed its session"));
  return reply;
}

v1::MemberMessage Daemon::NewsOfEnd(const Session& session, bool closed,
                                    const std::string& detail) {
  v1::MemberMessage message;
  v1::RankGone& gone = *message.mutable_rank_gone();
  gone.set_rank(session.rank);
  gone.set_closed(closed);
  gone.set_detail(detail);
  gone.set_incarnation(session.incarnation);
  return message;
}

// A session that the group does not take, and the job that it alone named.
void Daemon::ForgetDenied(uint64_t id) {
  sessions_.erase(id);
  if (sessions_.empty() && job_ != nullptr && !job_->planned()) job_.reset();
}

void Daemon::RemoveSession(uint64_t id, bool closed, const std::string& detail) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  const Session session = std::move(found->second);
  sessions_.erase(found);
  // The lanes keep what a dead trainer has: the daemon holds that memory, what is committed is
  // published into it, and the replacement maps it again.
  if (job_ != nullptr && session.state == Session::State::kAttached && closed) {
    v1::LaneCommand command;
    command.mutable_detach()->set_rank(session.rank);
    command.mutable_detach()->set_incarnation(session.incarnation);
    ToLanes(command);
  }
  const std::string job = job_ == nullptr ? "" : job_->name;
  if (closed) {
    log::Info("session closed",
              {{"job", job}, {"epoch", epoch_}, {"rank", session.rank}, {"pid", session.pid}});
  } else {
    log::Warn("trainer gone", {{"job", job},
                               {"epoch", epoch_},
                               {"step", LastCommitted()},
                               {"rank", session.rank},
                               {"pid", session.pid},
                               {"what", detail}});
  }
  attach_->Close(session.attach);
  mutex_.Changed();
  const bool denied = !session.denied.ok();
  // The coordinator knows whether there is something to wait for, or all have to begin anew.
  if (!closed && !denied && job_ != nullptr && job_->planned() && job_->failed.ok()) {
    // The attempt that ends with it. One that a job has gone back to waits for all ranks instead.
    const bool goes_back = !job_->has_state && job_->wire.restore_step() > 0;
    const scheduler::Attempt ends =
        job_->steps.has_value() && !goes_back ? job_->steps->open().attempt : scheduler::Attempt(0);
    // A replacement that dies before it has attached leaves the place as it found it.
    Vacancy& vacancy =
        job_->vacancies.try_emplace(session.rank, Vacancy{.attempt = ends}).first->second;
    vacancy.pid = session.pid;
    vacancy.process = session.process;
  }
  // The coordinator may have taken one that this node has denied. Such a one has died, however it
  // ends: the rank may come again, as one that has closed its session may not.
  v1::MemberMessage message = NewsOfEnd(session, closed && !denied, detail);
  if (job_ != nullptr) {
    job_->gone[session.rank] = message.rank_gone();
    if (closed) job_->attachments.erase(session.rank);
  }
  Tell(std::move(message));
  if (denied) ForgetDenied(id);
  if (job_ != nullptr && job_->abandoned && sessions_.empty()) {
    EndJob("nobody is left in a job that was lost");
  }
}

void Daemon::HandleExpel(const v1::ExpelRank& expel) {
  for (const auto& [id, session] : sessions_) {
    if (session.rank != expel.rank() || session.first_attempt.value() > expel.attempt()) continue;
    RemoveSession(id, /*closed=*/false,
                  absl::StrCat("rank ", session.rank, " (pid ", session.pid,
                               ") counts as dead: ", expel.detail()));
    return;
  }
}

void Daemon::ForgetRefusedOpens(Deadline now) {
  for (auto refused = refused_opens_.begin(); refused != refused_opens_.end();) {
    if (now < refused->second.forget_at) {
      ++refused;
      continue;
    }
    attach_->Close(refused->first);
    refused = refused_opens_.erase(refused);
  }
}

void Daemon::OnAttachGone(AttachId id) {
  StateLock lock(mutex_);
  refused_opens_.erase(id);
  for (const auto& [session_id, session] : sessions_) {
    if (session.attach != id) continue;
    RemoveSession(session_id, /*closed=*/false,
                  absl::StrCat("the trainer of rank ", session.rank, " (pid ", session.pid,
                               ") is gone without closing its session"));
    return;
  }
}

}  // namespace dmuond::server
