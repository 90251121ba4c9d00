// A job that goes back to a snapshot while its trainers live: sessions and arenas stay, everything
// else begins as with a job that is restored.
#include <chrono>
#include <cstring>
#include <functional>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dmuond/fault/fault_point.h"
#include "scheduler/convert/convert.h"
#include "scheduler/convert/registrations.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/daemon/daemon.h"

namespace dmuond::server {
namespace {

// Answers of LoadSnapshot for who repeats it. A client has one call on its way.
constexpr size_t kLoadsKept = 16;

absl::Status SetAsideAfter(storage::Storage& storage, const std::string& job,
                           scheduler::StepId step) {
  absl::StatusOr<Restorable> to = FindRestorable(storage, job, step);
  if (!to.ok()) return to.status();
  absl::StatusOr<storage::SnapshotStore> store = storage::SnapshotStore::Create(storage, job);
  return store.ok() ? store->SetAsideAfter(to->id) : store.status();
}

// The step of a snapshot that the job can go back to: of that step, or the newest (0).
absl::StatusOr<int64_t> WayBack(storage::Storage& storage, const std::string& job, int64_t step,
                                const scheduler::PlanInputs& inputs, const GroupConfigs& groups,
                                const std::function<bool()>& unwanted) {
  absl::StatusOr<std::optional<Restorable>> to = std::nullopt;
  if (step == 0) {
    to = FindRestorable(storage, job);
  } else {
    absl::StatusOr<Restorable> exactly = FindRestorable(storage, job, scheduler::StepId(step));
    if (exactly.ok()) {
      to = *std::move(exactly);
    } else {
      to = exactly.status();
    }
  }
  if (to.ok() && !to->has_value()) {
    return Error(absl::StatusCode::kNotFound, "JOB_HAS_NO_STATE",
                 Say("job '", Named("job", job), "' has no snapshot"));
  }
  absl::Status same = to.status();
  if (same.ok()) same = CheckRestorable((*to)->manifest, inputs, groups);
  // Nothing is given up for what cannot be read.
  if (same.ok()) same = VerifyWhole(storage, **to, unwanted);
  if (same.ok()) return (*to)->id.step.value();
  return ReasonOf(same).empty() ? WithReason(same, "SNAPSHOT_BROKEN") : same;
}

// A job goes back under the plan that it has.
bool SameButForTheStep(v1::PlanInputs a, const v1::PlanInputs& b) {
  a.set_restore_step(b.restore_step());
  return a.SerializeAsString() == b.SerializeAsString();
}

}  // namespace

void Daemon::HandleRollBack(const v1::RollBack& back) {
  epoch_ = back.epoch();
  newest_epoch_.store(back.epoch());
  const v1::PlanInputs& plan = back.plan();
  GiveWayTo(plan);
  if (job_ != nullptr && (job_->name != plan.job() || !job_->failed.ok())) return TellCannotGoOn();
  fault::FaultPoint("daemon.rollback");
  log::Warn("the job goes back to a snapshot", {{"job", plan.job()},
                                                {"epoch", absl::StrCat(epoch_)},
                                                {"from_step", absl::StrCat(LastCommitted())},
                                                {"to_step", absl::StrCat(plan.restore_step())},
                                                {"what", back.why()}});
  if (job_ == nullptr || !job_->planned()) {
    HandlePlan(plan);
    job_->rolled_back = job_->planned();
    return;
  }
  if (!SameButForTheStep(plan, job_->wire)) {
    return TellPlanFailed(Error(absl::StatusCode::kFailedPrecondition, "PLAN_DIFFERS",
                                Say("job '", Named("job", plan.job()), "' is to go back to step ",
                                    Named("to_step", plan.restore_step()),
                                    " under another plan than the one that it has here")));
  }
  job_->rolled_back = true;
  job_->back = {plan.restore_step(), back.epoch(), back.asked()};
  for (auto& [id, session] : sessions_) {
    // Who has not heard yet that it is attached learns by that where the job stands.
    if (!session.attach_reply.has_value()) continue;
    session.must_acknowledge = job_->back;
  }
  job_->wire = plan;
  // What is being prepared has no state yet, and no lanes: they start when it is there.
  if (job_->preparing != nullptr) return;
  ForgetState();
  ReplaceLanes(back.epoch(), back.why());
}

void Daemon::ForgetState() {
  job_->steps.reset();
  job_->has_state = false;
  job_->applied_attempt = 0;
  job_->published_attempt = 0;
  job_->publishing_attempt = 0;
  job_->lanes.ForgetState();
  LetGo(std::exchange(job_->pending, std::make_shared<PendingState>()));
  job_->submitted_states.clear();
  job_->trainer_states.clear();
  job_->snapshots.GiveUp("the job goes back to an older step");
  job_->snapshots.restored = false;
  job_->snapshots.part.GoBack();
  // In a new epoch every attempt is newer than those that trainers have died in.
  for (auto& [rank, vacancy] : job_->vacancies) vacancy.attempt = scheduler::Attempt(0);
  job_->forget_state = true;
  if (options_.node != 0 || reads_ == nullptr) return;
  committing_ = 0;
  // By the thread that brings the state back, before it does: nobody goes on while newer snapshots
  // count. And by the one that writes, before anything of the new epoch: what it is at may be a
  // manifest.
  for (Disk* disk : {reads_.get(), writes_.get()}) {
    disk->Post([disk, job = job_->name, step = scheduler::StepId(job_->wire.restore_step())] {
      const absl::Status aside = SetAsideAfter(disk->storage(), job, step);
      if (!aside.ok()) log::Warn("newer snapshots still count", {{"job", job}, {"what", aside}});
    });
  }
}

scheduler::StepAnswer Daemon::RolledBack(const Session& session, scheduler::StepId step,
                                         scheduler::Attempt attempt) {
  const scheduler::StepId to(session.must_acknowledge->to_step);
  scheduler::StepAnswer answer;
  scheduler::Outcome& outcome = answer.outcome.emplace();
  outcome.kind = scheduler::OutcomeKind::kRolledBack;
  if (!session.must_acknowledge->asked) outcome.reason = scheduler::OutcomeReason::kPeerLost;
  outcome.step = step;
  outcome.attempt = attempt;
  outcome.to_step = to;
  outcome.epoch = scheduler::GroupEpoch(session.must_acknowledge->epoch);
  outcome.durable_step = to;
  outcome.detail = absl::StrCat("the job has gone back to step ", to.value());
  return answer;
}

absl::Status Daemon::RolledBackError(int32_t rank, const Rollback& back) {
  return Error(absl::StatusCode::kFailedPrecondition, "ROLLED_BACK",
               Say("the job has gone back to step ", Named("to_step", back.to_step), " in epoch ",
                   Named("epoch", back.epoch), " (",
                   Named("cause", back.asked ? "LOAD_SNAPSHOT" : "PEER_LOST"), "): rank ",
                   Named("rank", rank), " must acknowledge it first"));
}

absl::Status Daemon::CheckNotRolledBack(const Session& session) {
  if (!session.must_acknowledge.has_value()) return absl::OkStatus();
  return RolledBackError(session.rank, *session.must_acknowledge);
}

absl::StatusOr<bool> Daemon::WaitUntilRestarted(const v1::SessionKey& key, Deadline deadline,
                                                const Cancelled& cancelled) {
  absl::StatusOr<Session*> found = Find(key);
  absl::StatusOr<bool> begun = Wait(
      [&]() DMUOND_REQUIRES(mutex_) {
        found = Find(key);
        return !found.ok() || !JobFailure().ok() || (*found)->must_acknowledge.has_value() ||
               WhyNotRestarted().has_value() ||
               (job_->has_state && job_->steps.has_value() &&
                job_->steps->open().attempt.value() > job_->applied_attempt);
      },
      deadline, cancelled);
  if (!begun.ok()) return begun.status();
  if (!found.ok()) return found.status();
  if (absl::Status failure = JobFailure(); !failure.ok()) return failure;
  if (const auto why = WhyNotRestarted(); why.has_value()) {
    return Error(absl::StatusCode::kDeadlineExceeded, "RANKS_MISSING",
                 Say("job '", Named("job", job_->name), "' does not go on from step ",
                     Named("to_step", job_->wire.restore_step()), ": ", *why));
  }
  return begun;
}

// A job that goes back opens attempts, and has no state before all ranks have come to it: the only
// decision that is for good then is that somebody will not.
std::optional<std::string> Daemon::WhyNotRestarted() const {
  if (job_ == nullptr || job_->has_state || !job_->steps.has_value()) return std::nullopt;
  const std::optional<scheduler::Decision>& decided = job_->steps->last_decision();
  if (!decided.has_value() || decided->verdict != scheduler::Verdict::kAbort ||
      decided->outcome.retry) {
    return std::nullopt;
  }
  return decided->outcome.detail;
}

absl::StatusOr<v1::AckRollbackReply> Daemon::AckRollback(const v1::AckRollbackRequest& request,
                                                         const Cancelled& cancelled) {
  StateLock lock(mutex_);
  absl::StatusOr<Session*> found = Find(request.key());
  if (!found.ok()) return found.status();
  Session& session = **found;
  const Rollback acknowledged{request.to_step(), request.epoch()};
  if (session.must_acknowledge.has_value()) {
    // A late call of an earlier one is no answer to this one.
    if (session.must_acknowledge != acknowledged) return CheckNotRolledBack(session);
    session.acknowledged = std::exchange(session.must_acknowledge, std::nullopt);
    session.acknowledge_reply.reset();
    fault::FaultPoint("daemon.acknowledged");
    if (!job_->reforming) Tell(NewsOfAttached(session));
  } else if (session.acknowledged != acknowledged) {
    return Error(absl::StatusCode::kFailedPrecondition, "STEP_OUT_OF_ORDER",
                 Say("rank ", Named("rank", session.rank), " acknowledges step ",
                     Named("to_step", request.to_step()), " in epoch ",
                     Named("epoch", request.epoch()), ", and the job has not gone back then"));
  }
  // The coordinator ends it by then: a rank that lives has step_timeout to come, and its place
  // waits session_linger. Ours, a little later, is for a coordinator that is gone.
  const auto begun_within = options_.coordinator.step.session_linger + options_.step_timeout +
                            options_.coordinator.register_timeout + std::chrono::seconds(10);
  absl::StatusOr<bool> begun = false;
  do {
    begun = WaitUntilRestarted(request.key(), std::chrono::steady_clock::now() + begun_within,
                               cancelled);
  } while (begun.ok() && !*begun && IsRestoring());
  if (!begun.ok()) return begun.status();
  found = Find(request.key());
  if (!found.ok()) return found.status();
  if (absl::Status again = CheckNotRolledBack(**found); !again.ok()) return again;
  if (!*begun) {
    return Error(absl::StatusCode::kDeadlineExceeded, "RANKS_MISSING",
                 Say("the coordinator has not said within ",
                     Named("timeout_ms", std::chrono::milliseconds(begun_within).count()),
                     " ms that every rank has acknowledged, or come back"));
  }
  // Once: a copy of the call may be late, and the trainer write its weights meanwhile.
  std::optional<v1::AckRollbackReply>& reply = (*found)->acknowledge_reply;
  if (!reply.has_value()) {
    PublishSince(**found, job_->applied_attempt);
    reply.emplace();
    reply->set_trainer_state(TrainerStateOf((*found)->rank));
    reply->set_next_attempt(job_->steps->open().attempt.value());
  }
  return *reply;
}

absl::StatusOr<int64_t> Daemon::FindWayBack(int64_t step, const Cancelled& cancelled) {
  if (options_.storage == nullptr) {
    return Error(absl::StatusCode::kFailedPrecondition, "NO_SNAPSHOTS",
                 "this daemon has no --snapshot_dir: there is nothing to load");
  }
  // One that goes back, or begins from a snapshot, is waited for until it has.
  if (job_ == nullptr || job_->plan == nullptr ||
      (!job_->has_state && job_->wire.restore_step() == 0)) {
    return Error(absl::StatusCode::kFailedPrecondition, "JOB_HAS_NO_STATE",
                 "no job runs here that could go back: a job that begins is resumed instead");
  }
  if (absl::Status failure = JobFailure(); !failure.ok()) return failure;
  // Nobody gives up what is in memory while nothing can be saved.
  if (writes_ != nullptr && writes_->hangs()) return DirectoryHangs(*writes_);
  const std::string job = job_->name;
  const uint64_t incarnation = job_->wire.job_incarnation();
  const Rollback before = job_->back;
  const std::shared_ptr<const scheduler::PlanInputs> inputs = job_->inputs;
  const auto groups = AnyOf(job_->wire).groups();
  const auto check = [&]() DMUOND_REQUIRES(mutex_) {
    const absl::Status still = CheckStill(job, incarnation);
    return still.ok() && job_->back != before ? WentElsewhere() : still;
  };
  for (;;) {
    absl::StatusOr<bool> formed =
        Wait([&]() DMUOND_REQUIRES(mutex_) { return !check().ok() || Settled(); }, Deadline::max(),
             cancelled);
    if (!formed.ok()) return formed.status();
    if (absl::Status still = check(); !still.ok()) return still;
    // What is read is of no use in a later one, in which the group may need the disk.
    const uint32_t epoch = epoch_;
    auto way = std::make_shared<absl::StatusOr<int64_t>>(0);
    absl::Status read = Read(
        [=](storage::Storage& storage, const Cancelled& unwanted) {
          *way = WayBack(storage, job, step, *inputs, groups, unwanted);
        },
        [&]() DMUOND_REQUIRES(mutex_) { return cancelled() || epoch_ != epoch || !check().ok(); });
    if (absl::Status still = check(); !still.ok()) return still;
    if (epoch_ != epoch) continue;
    if (!read.ok()) return read;
    return *way;
  }
}

absl::Status Daemon::WentElsewhere() const {
  return Error(absl::StatusCode::kFailedPrecondition, "ROLLED_BACK",
               Say("the job has gone back to step ", Named("to_step", job_->back.to_step),
                   " in epoch ", Named("epoch", job_->back.epoch), " meanwhile"));
}

Rollback Daemon::TellGoBack(int64_t step, const std::string& why) {
  const Rollback told{step, epoch_};
  v1::MemberMessage message;
  message.mutable_load_snapshot()->set_step(step);
  message.mutable_load_snapshot()->set_why(why);
  message.mutable_load_snapshot()->set_epoch(told.epoch);
  Tell(std::move(message));
  return told;
}

absl::StatusOr<int64_t> Daemon::WaitUntilBack(const Rollback& told, const Cancelled& cancelled) {
  const std::string job = job_ == nullptr ? "" : job_->name;
  const uint64_t incarnation = job_ == nullptr ? 0 : job_->wire.job_incarnation();
  const auto went = [&]() DMUOND_REQUIRES(mutex_) { return job_->back.epoch > told.epoch; };
  absl::StatusOr<bool> back = Wait(
      [&]() DMUOND_REQUIRES(mutex_) {
        return !CheckStill(job, incarnation).ok() || went() || (Settled() && epoch_ > told.epoch);
      },
      Deadline::max(), cancelled);
  if (!back.ok()) return back.status();
  if (absl::Status still = CheckStill(job, incarnation); !still.ok()) return still;
  // A group that goes on in a later epoch without it was broken when it was told.
  if (!went()) {
    return Error(absl::StatusCode::kUnavailable, "PEER_LOST",
                 "the group broke and did not hear of it: ask again");
  }
  if (job_->back.to_step != told.to_step) return WentElsewhere();
  return told.to_step;
}

absl::StatusOr<int64_t> Daemon::LoadOnce(const v1::LoadSnapshotRequest& request,
                                         const Cancelled& cancelled) {
  absl::StatusOr<Session*> found = Find(request.key());
  if (!found.ok()) return found.status();
  LoadCall* call = &(*found)->loads[request.call()];
  const std::string why = absl::StrCat("rank ", (*found)->rank, " asked for it");
  call->running = true;
  log::Info("a trainer asks for a snapshot", {{"rank", (*found)->rank}, {"step", request.step()}});
  absl::StatusOr<int64_t> answer =
      call->told.has_value() ? absl::StatusOr<int64_t>(0) : FindWayBack(request.step(), cancelled);
  // Only the session's own end takes the entry away while it runs.
  if (found = Find(request.key()); !found.ok()) return found.status();
  call = &(*found)->loads[request.call()];
  if (answer.ok()) {
    const bool first = !call->told.has_value();
    if (first) call->told = {*answer, epoch_};
    const Rollback told = *call->told;
    if (first) TellGoBack(*answer, why);
    answer = WaitUntilBack(told, cancelled);
    if (found = Find(request.key()); !found.ok()) return found.status();
    call = &(*found)->loads[request.call()];
  }
  call->running = false;
  // Whoever repeats a call whose caller has gone goes on with it.
  if (!absl::IsCancelled(answer.status())) call->answer = answer;
  mutex_.Changed();
  return answer;
}

absl::StatusOr<v1::LoadSnapshotReply> Daemon::LoadSnapshot(const v1::LoadSnapshotRequest& request,
                                                           const Cancelled& cancelled) {
  StateLock lock(mutex_);
  absl::StatusOr<Session*> found = Find(request.key());
  if (!found.ok()) return found.status();
  std::map<uint64_t, LoadCall>& loads = (*found)->loads;
  if (!loads.contains(request.call())) {
    const uint64_t newest = loads.empty() ? 0 : loads.rbegin()->first;
    if (request.call() <= newest) {
      return Error(absl::StatusCode::kFailedPrecondition, "CALL_OUT_OF_ORDER",
                   Say("LoadSnapshot ", Named("call", request.call()), " of rank ",
                       Named("rank", (*found)->rank), " comes after ", Named("newest", newest)));
    }
    if (absl::Status back = CheckNotRolledBack(**found); !back.ok()) return back;
    if (loads.size() >= kLoadsKept && !loads.begin()->second.running) loads.erase(loads.begin());
    loads[request.call()];
  }
  absl::StatusOr<bool> turn = Wait(
      [&]() DMUOND_REQUIRES(mutex_) {
        found = Find(request.key());
        return !found.ok() || !(*found)->loads[request.call()].running;
      },
      Deadline::max(), cancelled);
  if (!turn.ok()) return turn.status();
  if (!found.ok()) return found.status();
  const std::optional<absl::StatusOr<int64_t>> known = (*found)->loads[request.call()].answer;
  absl::StatusOr<int64_t> step = known.has_value() ? *known : LoadOnce(request, cancelled);
  if (!step.ok()) return step.status();
  v1::LoadSnapshotReply reply;
  reply.set_step(*step);
  return reply;
}

absl::StatusOr<v1::LoadJobReply> Daemon::LoadJob(const v1::LoadJobRequest& request,
                                                 const Cancelled& cancelled) {
  StateLock lock(mutex_);
  absl::StatusOr<int64_t> step = FindWayBack(request.step(), cancelled);
  if (step.ok()) {
    step = WaitUntilBack(TellGoBack(*step, "dmuonctl asked for it"), cancelled);
  }
  if (!step.ok()) return step.status();
  v1::LoadJobReply reply;
  reply.set_step(*step);
  return reply;
}

}  // namespace dmuond::server
