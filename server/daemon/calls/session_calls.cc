// What trainers call to come to a job, and to leave it.
#include "server/daemon/calls/session_calls.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <variant>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/fault_point.h"
#include "scheduler/convert/convert.h"
#include "scheduler/convert/registrations.h"
#include "scheduler/job/refusals.h"
#include "scheduler/shown_pid.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/daemon/calls/awaited.h"
#include "server/daemon/calls/checked_layout.h"
#include "server/plan_summary.h"
#include "server/version.h"

namespace dmuond::server {
namespace {

using scheduler::NodeJob;

constexpr size_t kJobNameMax = 128;
constexpr size_t kLaunchMax = 128;
constexpr size_t kEndJobMax = 1024;
constexpr int32_t kWorldMax = 1 << 20;

// The name is that of a directory of snapshots, too: "." and ".." lead elsewhere, and what begins
// with '.' is hidden.
bool ValidJobName(const std::string& name) {
  if (name.empty() || name.size() > kJobNameMax || name.front() == '.') return false;
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
    return Error(
        absl::StatusCode::kInvalidArgument, "JOB_NAME_INVALID",
        Say("job name '", Named("job", request.job()),
            "': 1 to 128 letters, digits, '.', '_' or '-' are allowed, of which the first is no "
            "'.'"));
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

v1::SessionKey KeyOf(v1::SessionKey halves, uint64_t incarnation) {
  halves.set_incarnation(incarnation);
  return halves;
}

// Names the start that a session which discards belongs to; empty: it discards nothing.
std::string LaunchOf(const v1::OpenSessionRequest& request) {
  if (request.resume() != v1::OpenSessionRequest::RESUME_DISCARD) return "";
  // A trainer that is alone begins anew each time; its nonce is its own.
  return request.launch().empty() ? absl::BytesToHexString(request.nonce()) : request.launch();
}

}  // namespace

absl::Status RefusalOf(const scheduler::RankTable::Session& session) {
  return WithMetadata(session.refused, {{"refusals", absl::StrCat(session.refusals)}});
}

absl::StatusOr<v1::HelloReply> SessionCalls::Hello(const v1::HelloRequest& request) {
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
  reply.set_features(request.features() & (v1::FEATURE_NOT_FINITE | v1::FEATURE_CHUNKS));
  reply.set_server(absl::StrCat("dmuond ", kBuildVersion));
  reply.set_lanes(core_.options.lanes);
  reply.set_device_type(core_.device.type());
  return reply;
}

// ---- OpenSession ----

absl::Status SessionCalls::Check(const v1::OpenSessionRequest& request) const {
  absl::Status checked = CheckOpenSession(request, core_.options);
  checked.Update(core_.device.ArenaMemory(request.rank(), request.device_uuid()).status());
  return checked;
}

bool SessionCalls::HasHeardOf(const std::string& nonce) {
  StateLock lock(core_.mutex);
  return core_.clients.Knows(nonce);
}

absl::StatusOr<v1::OpenSessionReply> SessionCalls::OpenSession(
    const v1::OpenSessionRequest& request, const Core::Cancelled& cancelled) {
  StateLock lock(core_.mutex);
  Clients& clients = core_.held_clients();
  absl::StatusOr<bool> alone = core_.Wait(
      [&]() DMUOND_REQUIRES(core_.mutex) { return !clients.opening().contains(request.nonce()); },
      Core::Deadline::max(), cancelled);
  if (!alone.ok()) return alone.status();
  if (const Client* same = clients.OfRequest(request.SerializeAsString()); same != nullptr) {
    return same->opened;
  }
  if (const absl::Status* refused = clients.RefusalOf(request.nonce()); refused != nullptr) {
    return *refused;
  }
  absl::StatusOr<AttachPeer> peer = core_.attach->Claim(request.nonce());
  if (!peer.ok()) return peer.status();
  clients.opening().insert(request.nonce());
  absl::StatusOr<v1::OpenSessionReply> opened = OpenClaimed(request, *peer, cancelled);
  clients.opening().erase(request.nonce());
  if (!opened.ok()) clients.KeepRefusal(peer->id, request.nonce(), opened.status());
  core_.mutex.Changed();
  return opened;
}

absl::Status SessionCalls::WaitUntilVacant(const v1::OpenSessionRequest& request,
                                           const TrainerProcess& successor,
                                           const Core::Cancelled& cancelled) {
  // A launcher may be faster than the news of its child's end.
  constexpr std::chrono::seconds kNewsTravel{1};
  const auto now = std::chrono::steady_clock::now();
  absl::StatusOr<bool> gone = core_.Wait(
      [&]() DMUOND_REQUIRES(core_.mutex) {
        return !core_.job.exists() || core_.job.name() != request.job() ||
               core_.job.ranks().OfRank(request.rank()) == nullptr;
      },
      now + kNewsTravel, cancelled);
  if (!gone.ok()) return gone.status();
  const scheduler::RankTable::Vacancy* left = nullptr;
  TrainerProcessPtr last;
  gone = core_.Wait(
      [&]() DMUOND_REQUIRES(core_.mutex) {
        left = core_.job.ranks().VacancyOf(request.rank());
        last = left == nullptr ? nullptr : core_.clients.ProcessOf(left->session);
        return last == nullptr || !last->RunsBeside(successor);
      },
      now + core_.options.coordinator.register_timeout, cancelled);
  if (!gone.ok()) return gone.status();
  if (*gone) return absl::OkStatus();
  return scheduler::PredecessorRuns(request.rank(), last->peer.pid(), left->client);
}

absl::StatusOr<std::optional<scheduler::ResumePoint>> SessionCalls::FindResume(
    NodeJob::Opening& opening, const Core::Cancelled& cancelled) {
  if (core_.options.storage == nullptr) return std::nullopt;
  struct Found {
    absl::StatusOr<storage::SnapshotOwners> owners = storage::SnapshotOwners();
    absl::StatusOr<std::optional<Restorable>> newest = std::nullopt;
  };
  const std::string& job = opening.job;
  const bool discards = opening.resume == v1::OpenSessionRequest::RESUME_DISCARD;
  auto result = std::make_shared<Found>();
  absl::Status read = core_.Read(
      [result, job, discards](storage::Storage& storage, const Core::Cancelled& /*unwanted*/) {
        result->owners = OwnersOf(storage, job);
        if (!discards) result->newest = FindRestorable(storage, job);
      },
      cancelled);
  if (!read.ok()) return read;
  // Whose they are is not guessed.
  if (!result->owners.ok()) return WithReason(result->owners.status(), "SNAPSHOT_FAILED");
  const auto& [uids, unread] = *result->owners;
  const scheduler::JobUids& may = core_.options.coordinator.job_uids;
  for (const uint32_t owner : uids) {
    if (may.MayTakePart(owner, opening.uid)) continue;
    return scheduler::JobOfAnotherUser(job, owner, opening.rank, opening.uid);
  }
  if (uids.empty() && !unread.ok() && !may.MayInAll(opening.uid)) {
    return Error(absl::StatusCode::kFailedPrecondition, "SNAPSHOT_BROKEN",
                 Say("nothing says any more whose the snapshots of job '", Named("job", job),
                     "' are: ", scheduler::MessageOf(unread),
                     ". Root, the daemon's user and --admin_uids may go on with it or discard it; "
                     "docs/snapshots.md says what to do"));
  }
  opening.owner_uid = uids.empty() ? std::nullopt : std::optional(uids.front());
  const absl::StatusOr<std::optional<Restorable>>& found = result->newest;
  if (!found.ok()) {
    return Error(absl::StatusCode::kFailedPrecondition, "SNAPSHOT_BROKEN",
                 Say("job '", Named("job", job), "' cannot go on from its newest snapshot: ",
                     scheduler::MessageOf(found.status()), "; docs/snapshots.md says what to do"));
  }
  if (!found->has_value()) return std::nullopt;
  // Newer ones, which are broken, may name another.
  if ((*found)->manifest.has_owner_uid()) opening.owner_uid = (*found)->manifest.owner_uid();
  return scheduler::ResumePoint{(*found)->manifest, (*found)->trainers};
}

absl::Status SessionCalls::DiscardOlder(const NodeJob::Opening& opening,
                                        const Core::Cancelled& cancelled) {
  // A start may be faster than the news of the end of the one before.
  constexpr std::chrono::seconds kNewsTravel{1};
  constexpr std::chrono::milliseconds kPause{50};
  const NodeJob& job = core_.held_job();
  const Core::Deadline begun = std::chrono::steady_clock::now();
  const auto over = [&]() DMUOND_REQUIRES(core_.mutex) {
    return !job.exists() || job.name() != opening.job || job.launch() == opening.launch ||
           job.leaves();
  };
  while (!over()) {
    absl::Status refused;
    if (!job.ranks().empty()) {
      const scheduler::RankTable::Session& live = job.ranks().sessions().begin()->second;
      refused = scheduler::JobInUse(
          job.name(), opening.rank, live.rank,
          absl::StrCat("(", scheduler::SayPid(live.pid).text, ", ", live.client, ")"));
    } else {
      auto& refusals = core_.clients.discard_refusals();
      refusals.erase(opening.rank);
      const uint32_t epoch = job.epoch();
      core_.Do(core_.job.Discard(opening));
      absl::StatusOr<bool> answered = core_.Wait(
          [&]() DMUOND_REQUIRES(core_.mutex) {
            return over() || refusals.contains(opening.rank) || job.epoch() != epoch ||
                   !job.ranks().empty();
          },
          begun + core_.options.coordinator.register_timeout, cancelled);
      if (!answered.ok()) return answered.status();
      if (!*answered) return job.NotReadyToOpen(opening.rank);
      const auto told = refusals.find(opening.rank);
      if (over() || told == refusals.end()) continue;
      refused = told->second;
    }
    const Core::Deadline now = std::chrono::steady_clock::now();
    if (now >= begun + kNewsTravel) return refused;
    absl::StatusOr<bool> waited = core_.Wait(over, now + kPause, cancelled);
    if (!waited.ok()) return waited.status();
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::OpenSessionReply> SessionCalls::OpenClaimed(
    const v1::OpenSessionRequest& request, const AttachPeer& peer,
    const Core::Cancelled& cancelled) {
  const DaemonOptions& options = core_.options;
  if (absl::Status checked = Check(request); !checked.ok()) return checked;
  const auto from_now = [&] {
    return std::chrono::steady_clock::now() + options.coordinator.register_timeout;
  };
  Core::Deadline deadline = from_now();
  absl::StatusOr<bool> formed = core_.Wait(
      [this]()
          DMUOND_REQUIRES(core_.mutex) { return core_.job.epoch() != 0 || core_.job.leaves(); },
      deadline, cancelled);
  if (!formed.ok()) return formed.status();
  const v1::SessionKey halves = NewSessionKey(core_.place, 0);
  NodeJob::Opening opening;
  opening.id = halves.session();
  opening.rank = request.rank();
  opening.world_size = request.world_size();
  opening.job = request.job();
  opening.launch = LaunchOf(request);
  opening.resume = request.resume();
  opening.pid = peer.process->peer.pid();
  opening.uid = peer.process->peer.uid();
  opening.end_is_seen = peer.process->peer.EndIsSeen();
  opening.client = request.client();
  const std::optional<scheduler::LaneIndex> own = core_.device.LaneOf(request.device_uuid());
  opening.home_lane = own.has_value()            ? own->value()
                      : request.home_lane() >= 0 ? request.home_lane()
                                                 : request.rank() % options.lanes;
  // Of a job without a plan the coordinator alone knows whose it is.
  absl::Status may = core_.coordinator == nullptr
                         ? absl::OkStatus()
                         : core_.coordinator->CheckUser(opening.job, opening.rank, opening.uid);
  if (may.ok()) may = core_.job.CheckUser(opening);
  if (!may.ok()) return may;
  if (*formed) {
    absl::Status vacant = WaitUntilVacant(request, *peer.process, cancelled);
    if (!vacant.ok()) return vacant;
  }

  std::optional<std::optional<scheduler::ResumePoint>> resume;
  NodeJob::OpenAnswer answer = absl::InternalError("not asked yet");
  scheduler::node::Actions actions;
  bool said = false;
  for (;;) {
    const auto why_not = core_.job.WhyNotOpen(opening, resume);
    const auto* waits = why_not.has_value() ? std::get_if<NodeJob::Later>(&*why_not) : nullptr;
    if (waits != nullptr && !std::exchange(said, true)) {
      log::Info("a trainer waits to begin", {{"job", opening.job},
                                             {"rank", opening.rank},
                                             scheduler::PidField<log::Field>(opening.pid),
                                             {"what", waits->why}});
    }
    absl::StatusOr<bool> come = core_.Wait(
        [&]() DMUOND_REQUIRES(core_.mutex) {
          const auto why = core_.job.WhyNotOpen(opening, resume);
          return !why.has_value() || !std::holds_alternative<NodeJob::Later>(*why);
        },
        deadline, cancelled);
    if (!come.ok()) return come.status();
    answer = core_.job.Open(std::chrono::steady_clock::now(), opening, resume, actions);
    if (const auto* later = std::get_if<NodeJob::Later>(&answer)) {
      // Bytes come, or the coordinator ends it.
      if (ReasonOf(later->why) == "GROUP_NOT_FORMED") return GroupNotFormed(core_);
      if (!later->long_wait) return later->why;
      deadline = from_now();
    } else if (std::holds_alternative<NodeJob::MustDiscard>(answer)) {
      absl::Status ends = DiscardOlder(opening, cancelled);
      if (!ends.ok()) return ends;
    } else if (std::holds_alternative<NodeJob::NeedsResume>(answer)) {
      // While the disk is read the job may begin here, or the group break.
      auto found = FindResume(opening, cancelled);
      if (!found.ok()) return found.status();
      resume = *std::move(found);
    } else {
      break;
    }
  }
  if (const auto* refused = std::get_if<absl::Status>(&answer)) return *refused;
  const NodeJob::Opened& opened = std::get<NodeJob::Opened>(answer);
  Client client;
  client.id = opening.id;
  client.secret = halves.secret();
  client.incarnation = opened.incarnation;
  client.rank = opening.rank;
  client.attach = peer.id;
  client.nonce = request.nonce();
  client.process = peer.process;
  client.device_uuid = request.device_uuid();
  client.poison = request.poison_parameters();
  core_.clients.Add(std::move(client));
  core_.Do(std::move(actions));
  // A coordinator in this process has answered already; another one answers RegisterLayout.
  absl::StatusOr<Client*> kept = core_.Find(KeyOf(halves, opened.incarnation));
  if (!kept.ok()) return kept.status();
  v1::OpenSessionReply reply;
  reply.set_session(opening.id);
  reply.set_secret(halves.secret());
  reply.set_incarnation(opened.incarnation);
  reply.set_job_incarnation(opened.job_incarnation);
  reply.set_has_state(opened.has_state);
  reply.set_last_committed_step(opened.last_committed);
  if (opened.durable_step.has_value()) reply.set_durable_step(*opened.durable_step);
  reply.set_trainer_state(opened.trainer_state);
  reply.set_step_timeout_ms(options.step_timeout.count());
  reply.set_published_timeout_ms(options.published_timeout().count());
  reply.set_session_linger_ms(options.coordinator.step.session_linger.count());
  fault::FaultPoint("daemon.session");
  (*kept)->request = request.SerializeAsString();
  (*kept)->opened = reply;
  log::Info("session opened", {{"job", request.job()},
                               {"epoch", core_.job.epoch()},
                               {"rank", request.rank()},
                               scheduler::PidField<log::Field>(opening.pid),
                               {"client", request.client()}});
  return reply;
}

absl::Status SessionCalls::CheckKey(const v1::SessionKey& key, const Caller* caller) {
  StateLock lock(core_.mutex);
  absl::StatusOr<Client*> found = core_.Find(key);
  if (!found.ok()) return found.status();
  const Client& client = **found;
  if (caller == nullptr) return absl::OkStatus();
  // The session's process lives as long as the session, so its pid is nobody else's. Where the
  // kernel tells nothing, users are told apart, and nothing more.
  const wire::PeerProcess& own = client.process->peer;
  const wire::ProcessId::Same same = own.id().SameAs(caller->process);
  if (same == wire::ProcessId::Same::kYes ||
      (same == wire::ProcessId::Same::kUnknown && own.uid() == caller->uid)) {
    return absl::OkStatus();
  }
  return Error(absl::StatusCode::kPermissionDenied, "SESSION_NOT_YOURS",
               Say("the session of rank ", Named("rank", client.rank), " is that of a process (",
                   scheduler::SayPid(own.pid()), "), the call comes from another one (pid ",
                   Named("other_pid", scheduler::ShownPid(caller->process.pid)), ", uid ",
                   Named("other_uid", caller->uid),
                   "): a child that was forked must open a session of its own"));
}

// ---- RegisterLayout ----

absl::StatusOr<v1::RegisterLayoutReply> SessionCalls::RegisterLayout(
    const v1::RegisterLayoutRequest& request, const Core::Cancelled& cancelled) {
  v1::Registration registration;
  {
    StateLock lock(core_.mutex);
    absl::StatusOr<Client*> found = core_.Find(request.key());
    if (!found.ok()) return found.status();
    const scheduler::RankTable::Session& session = core_.SessionOf(**found);
    registration.set_rank(session.rank);
    registration.set_node(core_.options.node);
    registration.set_home_lane(session.home_lane);
    registration.set_job(core_.job.name());
    registration.set_world_size(core_.job.world_size());
  }
  // Nobody waits while it is looked at.
  absl::StatusOr<CheckedLayout> checked = CheckLayout(std::move(registration), request);

  StateLock lock(core_.mutex);
  absl::StatusOr<Client*> found = core_.Find(request.key());
  if (!found.ok()) return found.status();
  const scheduler::RankTable::Session* session = &core_.SessionOf(**found);
  // Sent before the caller had read why its last registration was refused: the answer of that one.
  if (request.has_refusals() && request.refusals() < session->refusals) return RefusalOf(*session);
  if (!checked.ok()) return checked.status();
  registration = std::move(checked->wire);
  const int64_t bytes_max = core_.options.coordinator.peer_message_bytes_max;
  if (core_.options.nodes > 1 && static_cast<int64_t>(registration.ByteSizeLong()) > bytes_max) {
    return Error(absl::StatusCode::kResourceExhausted, "LAYOUT_TOO_LARGE",
                 Say("what rank ", Named("rank", session->rank), " registers has ",
                     Named("bytes", registration.ByteSizeLong()), " bytes, at most ",
                     Named("limit_bytes", bytes_max),
                     " cross between daemons: a larger --peer_message_bytes_max, on all of them"));
  }
  const bool first = session->state == scheduler::RankTable::State::kOpen;
  if (core_.job.plan() != nullptr && first) {
    absl::Status same = core_.job.CheckReplacement(*session, registration);
    if (!same.ok()) return same;
  }
  const int64_t refusals = session->refusals;
  if (!first && session->registration.SerializeAsString() != registration.SerializeAsString()) {
    return Error(absl::StatusCode::kFailedPrecondition, "LAYOUT_DIFFERS",
                 Say("rank ", Named("rank", session->rank),
                     " has registered another layout before; close the session first"));
  }
  const auto layout = std::make_shared<const scheduler::Registration>(std::move(checked->layout));
  if (first) core_.Do(core_.job.Register(session->id, std::move(registration), layout));

  const auto refused = [&]() DMUOND_REQUIRES(core_.mutex) {
    session = &core_.SessionOf(**found);
    return session->refusals > refusals;
  };
  // The coordinator's deadline ends the wait; ours, a little later, is for a coordinator that is
  // gone. While memory is made here it watches that something gets done.
  absl::StatusOr<bool> planned = false;
  do {
    planned = core_.Wait(
        [&]() DMUOND_REQUIRES(core_.mutex) {
          found = core_.Find(request.key());
          return !found.ok() || refused() || !core_.job.failure().ok() ||
                 core_.job.plan() != nullptr;
        },
        std::chrono::steady_clock::now() + core_.options.coordinator.register_timeout +
            std::chrono::seconds(10),
        cancelled);
  } while (planned.ok() && !*planned && core_.memory.preparing() != nullptr);
  if (!planned.ok()) return planned.status();
  if (!found.ok()) return found.status();
  if (refused()) return RefusalOf(*session);
  if (absl::Status failure = core_.job.failure(); !failure.ok()) return failure;
  if (!*planned) {
    return Error(
        absl::StatusCode::kDeadlineExceeded, "RANKS_MISSING",
        Say("job '", Named("job", core_.job.name()),
            "': the coordinator has not answered in time (`dmuonctl status` on node 0 says whether "
            "it lives). Not registered: ",
            Named("missing", MissingRanks(core_, [](const scheduler::RankTable::Session* one) {
                    return one != nullptr && one->state >= scheduler::RankTable::State::kRegistered;
                  }))));
  }

  const std::shared_ptr<const scheduler::PlanInputs> inputs = core_.job.inputs();
  const std::shared_ptr<const scheduler::Plan> plan = core_.job.plan();
  const std::shared_ptr<const scheduler::Registration> registered = session->layout;
  // The lock is not held for what has the size of a model.
  core_.mutex.Unlock();
  std::vector<int32_t> job_parameter = JobParameters(*registered, *inputs);
  v1::RegisterLayoutReply reply = ReplyOf(*inputs, *plan, job_parameter);
  core_.mutex.Lock();
  if (found = core_.Find(request.key()); !found.ok()) return found.status();
  (*found)->job_parameter = std::move(job_parameter);
  return reply;
}

// ---- until it ends ----

absl::Status SessionCalls::WatchSession(const v1::WatchSessionRequest& request,
                                        const Core::Cancelled& cancelled,
                                        const std::function<bool(const v1::SessionEvent&)>& write) {
  uint64_t told_attempt = 0;
  bool told_draining = false;
  for (;;) {
    v1::SessionEvent event;
    {
      StateLock lock(core_.mutex);
      const NodeJob& job = core_.held_job();
      absl::StatusOr<Client*> found = core_.Find(request.key());
      if (!found.ok()) return found.status();
      const auto news = [&]() -> const scheduler::Decision* {
        if (job.steps() == nullptr || !job.steps()->last_decision().has_value()) return nullptr;
        const scheduler::Decision& decided = *job.steps()->last_decision();
        return decided.attempt.value() > told_attempt &&
                       decided.verdict != scheduler::Verdict::kRefuse
                   ? &decided
                   : nullptr;
      };
      absl::StatusOr<bool> something = core_.Wait(
          [&]() DMUOND_REQUIRES(core_.mutex) {
            found = core_.Find(request.key());
            return !found.ok() || !job.failure().ok() || (job.leaves() && !told_draining) ||
                   news() != nullptr;
          },
          Core::Deadline::max(), cancelled);
      if (!something.ok()) return something.status();
      if (!found.ok()) return found.status();
      if (absl::Status failure = job.failure(); !failure.ok()) {
        event.set_job_ended(std::string(failure.message()));
      } else if (job.leaves() && !told_draining) {
        told_draining = true;
        event.set_draining("the daemon is leaving");
      } else {
        told_attempt = news()->attempt.value();
        *event.mutable_outcome() = ToProto(job.steps()->last_decision()->outcome);
      }
    }
    if (!write(event) || event.has_job_ended()) return absl::OkStatus();
  }
}

absl::Status SessionCalls::WaitUntilUnmapped() {
  const absl::StatusOr<bool> unmapped =
      core_.Wait([&]() DMUOND_REQUIRES(
                     core_.mutex) { return !core_.job.Unmaps() && !core_.lanes.host().ending(); },
                 std::chrono::steady_clock::now() + core_.options.coordinator.register_timeout,
                 [] { return false; });
  if (!unmapped.ok()) return unmapped.status();
  if (*unmapped) return absl::OkStatus();
  return Error(absl::StatusCode::kDeadlineExceeded, "GROUP_NOT_READY",
               "the session is closed, but a lane has not let go of the trainer's memory yet: the "
               "process must not free it");
}

absl::StatusOr<v1::CloseSessionReply> SessionCalls::CloseSession(
    const v1::CloseSessionRequest& request) {
  StateLock lock(core_.mutex);
  if (const auto* before = core_.clients.ClosedWith(request.key()); before != nullptr) {
    const v1::CloseSessionReply reply = *before;
    if (absl::Status unmapped = WaitUntilUnmapped(); !unmapped.ok()) return unmapped;
    return reply;
  }
  absl::StatusOr<Client*> found = core_.Find(request.key());
  if (!found.ok()) return found.status();
  const int32_t rank = (*found)->rank;
  const bool own_memory = core_.job.ranks().HasOwnMemory(core_.SessionOf(**found));
  if (request.end_job().size() > kEndJobMax) {
    return Error(absl::StatusCode::kInvalidArgument, "END_JOB_TOO_LONG",
                 Say("rank ", Named("rank", rank), " ends its job for a reason of ",
                     Named("bytes", request.end_job().size()), " bytes; at most ",
                     Named("bytes_max", kEndJobMax), " are possible"));
  }
  v1::CloseSessionReply reply;
  if (core_.job.steps() != nullptr) {
    reply.set_last_committed_step(core_.job.steps()->last_committed().value());
  }
  core_.clients.KeepClosed(request.key(), reply);
  if (!request.end_job().empty()) {
    core_.Do(
        core_.job.AskForEnd(absl::StrCat("rank ", rank, " has ended it: ", request.end_job())));
  }
  // It may have ended with the job.
  if (found = core_.Find(request.key()); found.ok()) core_.Do(core_.job.Close((*found)->id));
  if (own_memory) {
    if (absl::Status unmapped = WaitUntilUnmapped(); !unmapped.ok()) return unmapped;
  }
  return reply;
}

}  // namespace dmuond::server
