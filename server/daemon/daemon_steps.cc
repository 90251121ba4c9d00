// Steps and pushes: what trainers hand in, and what is decided about it.
#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "dmuond/fault/fault_point.h"
#include "scheduler/convert/convert.h"
#include "scheduler/convert/registrations.h"
#include "scheduler/scalar_ranges.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/daemon/daemon.h"

namespace dmuond::server {
namespace {

constexpr size_t kTrainerStateMax = size_t{1} << 20;
constexpr int32_t kWaitMsMax = 60'000;

std::chrono::steady_clock::time_point WaitDeadline(int32_t wait_ms) {
  return std::chrono::steady_clock::now() +
         std::chrono::milliseconds(std::clamp(wait_ms, 0, kWaitMsMax));
}

// The scalars agree between trainers or the step is refused; here they must also make sense.
absl::Status CheckScalars(int32_t rank, const scheduler::StepScalars& scalars,
                          const std::vector<scheduler::Parameter>& parameters) {
  const auto wrong = scheduler::FindOutOfRange(scalars, parameters);
  if (!wrong.has_value()) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, "SCALARS_INVALID",
               Say("rank ", Named("rank", rank), " submits ", Named("field", wrong->field), " = ",
                   Named("value", wrong->value), "; it must be ", Named("range", wrong->range)));
}

// An attempt may end while a trainer is between steps: the one that is open now is for it too.
absl::Status WithOpenAttempt(const absl::Status& status, scheduler::Attempt open) {
  if (ReasonOf(status) != "ATTEMPT_OUT_OF_ORDER") return status;
  ErrorMetadata metadata = MetadataOf(status);
  metadata.emplace_back("next_attempt", absl::StrCat(open.value()));
  return Error(status.code(), ReasonOf(status), std::string(status.message()), metadata);
}

// Trainers disagree. A corrected submit needs the attempt that is open now.
absl::Status Refusal(const scheduler::StepAnswer& answer) {
  ErrorMetadata metadata = MetadataOf(answer.refused);
  metadata.emplace_back("next_attempt", absl::StrCat(answer.next_attempt.value()));
  return Error(answer.refused.code(), ReasonOf(answer.refused),
               std::string(answer.refused.message()), metadata);
}

// What a list names, each once however often it was named.
void SortOnce(std::vector<int32_t>& parameters) {
  std::sort(parameters.begin(), parameters.end());
  parameters.erase(std::unique(parameters.begin(), parameters.end()), parameters.end());
}

}  // namespace

absl::StatusOr<scheduler::StepAnswer> Daemon::Submit(Session& session,
                                                     const scheduler::Submission& submission,
                                                     const std::string& trainer_state) {
  if (session.must_acknowledge.has_value()) {
    return RolledBack(session, submission.step, submission.attempt);
  }
  if (absl::Status attached = CheckAttached(session); !attached.ok()) return attached;
  const scheduler::StepMember& steps = *job_->steps;
  if (halted_ && submission.step > steps.last_committed()) {
    return Error(absl::StatusCode::kUnavailable, "DRAINING", "this daemon is leaving");
  }
  absl::StatusOr<scheduler::StepMember::Accepted> accepted = job_->steps->OnSubmission(submission);
  if (!accepted.ok()) return WithOpenAttempt(accepted.status(), steps.open().attempt);
  if (accepted->forward) {
    // Before anybody is told: the last one's submission may be decided while it is being told.
    job_->submitted_states[session.rank] = {submission.attempt, trainer_state};
    v1::RankSubmitted submitted = ToProto(submission);
    submitted.set_incarnation(session.incarnation);
    // Lanes first: one that sees `ready` must find what is absent.
    v1::LaneCommand command;
    *command.mutable_submitted() = submitted;
    ToLanes(command);
    Send(reports_.OnSubmitted(std::chrono::steady_clock::now(), std::move(submitted)));
  }
  return accepted->answer;
}

absl::StatusOr<scheduler::StepAnswer> Daemon::Await(const v1::SessionKey& key,
                                                    scheduler::StepId step,
                                                    scheduler::Attempt attempt, Deadline deadline,
                                                    const Cancelled& cancelled) {
  absl::StatusOr<scheduler::StepAnswer> answer = absl::InternalError("not asked yet");
  absl::StatusOr<bool> answered = Wait(
      [&]() DMUOND_REQUIRES(mutex_) {
        absl::StatusOr<Session*> session = Find(key);
        if (!session.ok()) {
          answer = session.status();
          return true;
        }
        if ((*session)->must_acknowledge.has_value()) {
          answer = RolledBack(**session, step, attempt);
          return true;
        }
        if (job_->steps.has_value()) {
          answer = job_->steps->OnWait(scheduler::TrainerRank((*session)->rank), step, attempt);
          if (!answer.ok()) {
            answer = WithOpenAttempt(answer.status(), job_->steps->open().attempt);
          }
        }
        // Also to who has handed nothing in, and asks why no weights come.
        const bool answers = answer.ok() && !answer->pending();
        if (!answers && !JobFailure().ok()) answer = JobFailure();
        return job_->steps.has_value() ? !answer.ok() || !answer->pending() : !JobFailure().ok();
      },
      deadline, cancelled);
  if (!answered.ok()) return answered.status();
  return answer;
}

absl::StatusOr<v1::SubmitStepReply> Daemon::SubmitStep(const v1::SubmitStepRequest& request,
                                                       const Cancelled& cancelled) {
  if (request.trainer_state().size() > kTrainerStateMax) {
    return Error(absl::StatusCode::kInvalidArgument, "TRAINER_STATE_TOO_LONG",
                 Say("trainer_state has ", Named("bytes", request.trainer_state().size()),
                     " bytes; at most ", Named("bytes_max", kTrainerStateMax), " are allowed"));
  }
  StateLock lock(mutex_);
  absl::StatusOr<Session*> found = Find(request.key());
  if (!found.ok()) return found.status();
  Session& session = **found;
  scheduler::Submission submission;
  submission.rank = scheduler::TrainerRank(session.rank);
  submission.attempt = scheduler::Attempt(request.attempt());
  submission.step = scheduler::StepId(request.step());
  submission.scalars = FromProto(request.scalars());
  absl::Status sane = CheckScalars(
      session.rank, submission.scalars,
      job_->inputs == nullptr ? session.layout.parameters : job_->inputs->layout.parameters);
  if (!sane.ok()) return sane;
  submission.withdraw = request.withdraw();
  for (const int32_t index : request.absent()) {
    if (index < 0 || index >= static_cast<int32_t>(session.job_parameter.size())) {
      return Error(
          absl::StatusCode::kInvalidArgument, "ABSENT_OUT_OF_RANGE",
          Say("rank ", Named("rank", session.rank), " calls parameter ", Named("parameter", index),
              " absent; it registered ", Named("parameters", session.job_parameter.size())));
    }
    submission.absent.push_back(session.job_parameter[index]);
  }
  SortOnce(submission.absent);
  if (job_->inputs != nullptr && WorldSizeOf(job_->wire) > 0 &&
      submission.scalars.groups.size() != static_cast<size_t>(AnyOf(job_->wire).groups_size())) {
    return Error(absl::StatusCode::kInvalidArgument, "SCALARS_DIFFER",
                 Say("rank ", Named("rank", session.rank), " submits scalars of ",
                     Named("given_groups", submission.scalars.groups.size()), " groups; ",
                     Named("groups", AnyOf(job_->wire).groups_size()), " are registered"));
  }
  absl::StatusOr<scheduler::StepAnswer> answer =
      Submit(session, submission, request.trainer_state());
  if (!answer.ok()) return answer.status();
  if (answer->pending()) {
    answer = Await(request.key(), submission.step, submission.attempt,
                   WaitDeadline(request.wait_ms()), cancelled);
    if (!answer.ok()) return answer.status();
  }
  if (!answer->refused.ok()) return Refusal(*answer);
  v1::SubmitStepReply reply;
  if (answer->outcome.has_value()) *reply.mutable_outcome() = ToProto(*answer->outcome);
  *reply.mutable_timing() = job_->timing;
  return reply;
}

absl::StatusOr<v1::WaitStepReply> Daemon::WaitStep(const v1::WaitStepRequest& request,
                                                   const Cancelled& cancelled) {
  StateLock lock(mutex_);
  absl::StatusOr<Session*> found = Find(request.key());
  if (!found.ok()) return found.status();
  if (!job_->steps.has_value() && !(*found)->must_acknowledge.has_value()) {
    return Error(absl::StatusCode::kFailedPrecondition, "STEP_OUT_OF_ORDER",
                 "no step has been submitted");
  }
  absl::StatusOr<scheduler::StepAnswer> answer =
      Await(request.key(), scheduler::StepId(request.step()), scheduler::Attempt(request.attempt()),
            WaitDeadline(request.wait_ms()), cancelled);
  if (!answer.ok()) return answer.status();
  if (!answer->refused.ok()) return Refusal(*answer);
  v1::WaitStepReply reply;
  if (answer->outcome.has_value()) *reply.mutable_outcome() = ToProto(*answer->outcome);
  *reply.mutable_timing() = job_->timing;
  if (answer->pending()) FillAwaited(*reply.mutable_awaited());
  return reply;
}

absl::Status Daemon::CheckAttached(const Session& session) const {
  if (session.state == Session::State::kAttached && job_->steps.has_value()) {
    return absl::OkStatus();
  }
  return Error(absl::StatusCode::kFailedPrecondition, "BUFFERS_MISSING",
               Say("rank ", Named("rank", session.rank), " must attach its buffers first"));
}

absl::StatusOr<Session*> Daemon::FindGoingOn(const v1::SessionKey& key) {
  absl::StatusOr<Session*> found = Find(key);
  if (!found.ok()) return found.status();
  if (absl::Status failure = JobFailure(); !failure.ok()) return failure;
  if (absl::Status back = CheckNotRolledBack(**found); !back.ok()) return back;
  return *found;
}

absl::StatusOr<Session*> Daemon::FindPusher(const v1::SessionKey& key) {
  absl::StatusOr<Session*> found = FindGoingOn(key);
  if (!found.ok()) return found.status();
  if (absl::Status attached = CheckAttached(**found); !attached.ok()) return attached;
  return *found;
}

absl::Status Daemon::CheckMayPush(const v1::SessionKey& key) {
  StateLock lock(mutex_);
  return FindPusher(key).status();
}

absl::StatusOr<scheduler::StepAnswer> Daemon::PushOnce(const v1::SessionKey& key,
                                                       const scheduler::Submission& submission,
                                                       const PushedState& state,
                                                       const Cancelled& cancelled) {
  if (submission.kind == scheduler::AttemptKind::kLoad && job_->steps.has_value() &&
      submission.attempt == job_->steps->open().attempt) {
    absl::Status loaded = WaitUntilPublished(cancelled);
    if (!loaded.ok()) return loaded;
    loaded = LoadPushedState(key, state, cancelled);
    if (!loaded.ok()) return loaded;
  }
  absl::StatusOr<Session*> found = Find(key);
  if (!found.ok()) return found.status();
  if (absl::Status failure = JobFailure(); !failure.ok()) return failure;
  absl::StatusOr<scheduler::StepAnswer> answer = Submit(**found, submission, "");
  if (!answer.ok() || !answer->pending()) return answer;
  return Await(key, submission.step, submission.attempt,
               std::chrono::steady_clock::now() + options_.step_timeout, cancelled);
}

absl::StatusOr<v1::PushParametersReply> Daemon::Push(const v1::PushParametersRequest& header,
                                                     const PushedState& state,
                                                     const Cancelled& cancelled) {
  StateLock lock(mutex_);
  absl::StatusOr<Session*> found = FindPusher(header.key());
  if (!found.ok()) return found.status();
  Session& session = **found;
  scheduler::Submission submission;
  submission.rank = scheduler::TrainerRank(session.rank);
  submission.kind = header.state() ? scheduler::AttemptKind::kLoad : scheduler::AttemptKind::kPush;
  submission.attempt =
      header.attempt() == 0 ? job_->steps->open().attempt : scheduler::Attempt(header.attempt());
  submission.step = scheduler::StepId(header.step());
  if (!header.all_weights() && !header.state()) {
    absl::flat_hash_map<absl::string_view, int32_t> job_parameter;
    for (int i = 0; i < session.registration.parameters_size(); ++i) {
      job_parameter.emplace(session.registration.parameters(i).name(), session.job_parameter[i]);
    }
    for (const std::string& name : header.weights()) {
      const auto at = job_parameter.find(name);
      if (at == job_parameter.end()) {
        return Error(absl::StatusCode::kInvalidArgument, "PARAMETER_UNKNOWN",
                     Say("rank ", Named("rank", session.rank), " pushes '",
                         Named("parameter", name), "', which it has not registered"));
      }
      submission.pushed.push_back(at->second);
    }
    SortOnce(submission.pushed);
    if (submission.pushed.empty()) {
      return Error(absl::StatusCode::kInvalidArgument, "PARAMETER_UNKNOWN",
                   "a push names no parameter and is not of all weights");
    }
  }
  absl::StatusOr<scheduler::StepAnswer> answer =
      PushOnce(header.key(), submission, state, cancelled);
  // What is pushed still lies where it lay: an attempt that ended for a retry costs only time. But
  // a new epoch publishes the masters over weights in arenas: their trainer writes them again.
  const auto lies_there = [&](scheduler::Attempt next) DMUOND_REQUIRES(mutex_) {
    return submission.kind == scheduler::AttemptKind::kLoad || !job_->has_state ||
           EpochOf(next) == EpochOf(submission.attempt);
  };
  while (answer.ok() && answer->refused.ok() && answer->outcome.has_value() &&
         answer->outcome->retry && lies_there(answer->outcome->next_attempt)) {
    submission.attempt = answer->outcome->next_attempt;
    answer = PushOnce(header.key(), submission, state, cancelled);
  }
  if (!answer.ok()) return answer.status();
  if (!answer->refused.ok()) return Refusal(*answer);
  if (answer->pending()) {
    return Error(absl::StatusCode::kDeadlineExceeded, "RANKS_MISSING",
                 Say("rank ", Named("rank", submission.rank.value()),
                     " pushed, but not every rank did within ",
                     Named("timeout_ms", options_.step_timeout.count()), " ms"));
  }
  if (answer->outcome->kind == scheduler::OutcomeKind::kRolledBack) {
    return RolledBackError(submission.rank.value(),
                           {answer->outcome->to_step.value(), answer->outcome->epoch.value()});
  }
  if (answer->outcome->kind != scheduler::OutcomeKind::kCommitted) {
    return Error(absl::StatusCode::kUnavailable, "PUSH_ABORTED",
                 absl::StrCat("the push was aborted: ", answer->outcome->detail),
                 {{"next_attempt", absl::StrCat(answer->outcome->next_attempt.value())},
                  {"retry", answer->outcome->retry ? "true" : "false"}});
  }
  v1::PushParametersReply reply;
  reply.set_next_attempt(answer->outcome->next_attempt.value());
  reply.set_last_committed_step(job_->steps->last_committed().value());
  return reply;
}

void Daemon::BeginSteps(scheduler::StepId last_committed) {
  if (job_->steps.has_value()) return;
  std::vector<scheduler::TrainerRank> local;
  for (const scheduler::Trainer& trainer : job_->inputs->layout.trainers) {
    if (trainer.node.value() == options_.node) local.push_back(trainer.rank);
  }
  job_->steps.emplace(std::move(local), options_.lanes, last_committed);
  job_->rolled_back = false;
}

void Daemon::HandleOpen(const v1::OpenAttempt& open) {
  if (job_ == nullptr || job_->plan == nullptr) return;
  BeginSteps(scheduler::StepId(open.step() - 1));
  fault::FaultPoint("daemon.open");
  job_->steps->OnOpen(FromProto(open));
  reports_.OnOpen(std::chrono::steady_clock::now(), FromProto(open));
  v1::LaneCommand command;
  *command.mutable_arm() = open;
  ToLanes(command);
  mutex_.Changed();
}

// A decision that is known is told again when lanes are new: those whose predecessors have not come
// to the end of a commit finish it.
void Daemon::FinishAgain(const v1::Decision& wire, const scheduler::Decision& decision) {
  if (decision.verdict != scheduler::Verdict::kCommit ||
      job_->published_attempt >= decision.attempt.value()) {
    return;
  }
  if (decision.kind == scheduler::AttemptKind::kLoad) {
    return ApplyPending(decision.attempt.value());
  }
  v1::LaneCommand command;
  *command.mutable_decision() = wire;
  for (int32_t i = 0; i < options_.lanes; ++i) {
    const scheduler::LaneIndex lane(i);
    if (job_->lanes[lane].published_attempt < decision.attempt.value()) ToLane(lane, command);
  }
}

void Daemon::HandleDecision(const v1::Decision& wire) {
  if (job_ == nullptr || !job_->steps.has_value()) return;
  absl::StatusOr<scheduler::Decision> decision = FromProto(wire);
  if (!decision.ok()) {
    log::Error("a decision that cannot be read", {{"job", job_->name},
                                                  {"epoch", epoch_},
                                                  {"step", wire.step()},
                                                  {"what", decision.status()}});
    return;
  }
  fault::FaultPoint("daemon.decision");
  if (decision->attempt < job_->steps->open().attempt) return FinishAgain(wire, *decision);
  if (decision->verdict == scheduler::Verdict::kCommit &&
      decision->kind == scheduler::AttemptKind::kLoad) {
    ApplyPending(decision->attempt.value());
  }
  v1::LaneCommand command;
  *command.mutable_decision() = wire;
  ToLanes(command);
  if (decision->verdict == scheduler::Verdict::kCommit &&
      decision->kind == scheduler::AttemptKind::kLoad) {
    v1::LaneCommand republish;
    republish.mutable_republish()->set_attempt(wire.attempt());
    ToLanes(republish);
  }
  const bool anybody_waits =
      std::any_of(sessions_.begin(), sessions_.end(), [&steps = *job_->steps](const auto& entry) {
        return steps.submitted(scheduler::TrainerRank(entry.second.rank));
      });
  fault::FaultPoint("daemon.decision.to_lanes");
  job_->steps->OnDecision(*decision);
  fault::FaultPoint("daemon.decision.known");
  job_->gradient_norm = decision->outcome.gradient_norm;
  if (decision->verdict == scheduler::Verdict::kCommit ||
      decision->verdict == scheduler::Verdict::kSkip) {
    job_->applied_attempt = decision->attempt.value();
    if (decision->kind == scheduler::AttemptKind::kStep) {
      for (auto& [rank, submitted] : job_->submitted_states) {
        if (submitted.attempt == decision->attempt)
          std::swap(job_->trainer_states[rank], submitted);
      }
    }
  }
  switch (decision->verdict) {
    case scheduler::Verdict::kCommit:
      job_->has_state = true;
      break;
    case scheduler::Verdict::kSkip:
      ++job_->skipped_steps;
      log::Warn("step skipped", {{"job", job_->name},
                                 {"epoch", absl::StrCat(epoch_)},
                                 {"step", absl::StrCat(wire.step())},
                                 {"what", decision->outcome.detail}});
      break;
    case scheduler::Verdict::kAbort:
    case scheduler::Verdict::kRefuse:
      // An attempt that nobody here has submitted ends without loss: a rank that closes, say.
      if (!anybody_waits) break;
      ++job_->aborted_attempts;
      log::Warn("attempt aborted", {{"job", job_->name},
                                    {"epoch", absl::StrCat(epoch_)},
                                    {"step", absl::StrCat(wire.step())},
                                    {"what", decision->verdict == scheduler::Verdict::kRefuse
                                                 ? decision->refuse_message
                                                 : decision->outcome.detail}});
      break;
  }
  mutex_.Changed();
}

void Daemon::HandleRepublish(const v1::Republish& republish) {
  if (job_ == nullptr || job_->plan == nullptr) return;
  fault::FaultPoint("daemon.republish");
  // The link may have broken before the first attempt of a job that went back was heard of.
  BeginSteps(scheduler::StepId(republish.step()));
  // The state as it was, under another attempt.
  job_->snapshots.part.OnRepublished(
      job_->applied_attempt, republish.attempt(),
      /*from_snapshot=*/job_->snapshots.restored && job_->applied_attempt == 0);
  job_->has_state = true;
  job_->applied_attempt = republish.attempt();
  v1::LaneCommand command;
  command.mutable_republish()->set_attempt(republish.attempt());
  ToLanes(command);
  mutex_.Changed();
}

void Daemon::HandleLanePublished(scheduler::LaneIndex lane,
                                 const v1::LaneReport::Published& published) {
  job_->lanes.OnPublished(lane, published.attempt());
  if (published.attempt() > job_->publishing_attempt) {
    job_->publishing_attempt = published.attempt();
    job_->publishing.Clear();
  }
  const v1::StepTiming& timing = published.timing();
  v1::StepTiming& slowest = job_->publishing;
  slowest.set_collect_us(std::max(slowest.collect_us(), timing.collect_us()));
  slowest.set_decide_us(std::max(slowest.decide_us(), timing.decide_us()));
  slowest.set_update_us(std::max(slowest.update_us(), timing.update_us()));
  slowest.set_publish_us(std::max(slowest.publish_us(), timing.publish_us()));
  slowest.set_quiet_us(std::max(slowest.quiet_us(), timing.quiet_us()));
  if (timing.sum_us() > slowest.sum_us()) {
    slowest.set_sum_us(timing.sum_us());
    slowest.set_sum_bytes(timing.sum_bytes());
  }
  slowest.set_norm_us(std::max(slowest.norm_us(), timing.norm_us()));
  if (timing.copy_us() > slowest.copy_us()) {
    slowest.set_copy_us(timing.copy_us());
    slowest.set_copy_bytes(timing.copy_bytes());
  }
  const uint64_t everywhere = job_->lanes.published_attempt();
  if (everywhere <= job_->published_attempt) return;
  fault::FaultPoint("daemon.published");
  job_->published_attempt = everywhere;
  job_->timing = job_->publishing;
  LetGo(job_->pending->DropThrough(job_->published_attempt));
  if (waiting_for_published_ > 0) mutex_.Changed();
}

absl::Status Daemon::WatchSession(const v1::WatchSessionRequest& request,
                                  const Cancelled& cancelled,
                                  const std::function<bool(const v1::SessionEvent&)>& write) {
  uint64_t told_attempt = 0;
  bool told_draining = false;
  for (;;) {
    v1::SessionEvent event;
    {
      StateLock lock(mutex_);
      absl::StatusOr<Session*> found = Find(request.key());
      if (!found.ok()) return found.status();
      absl::StatusOr<bool> something = Wait(
          [&]() DMUOND_REQUIRES(mutex_) {
            found = Find(request.key());
            if (!found.ok() || !JobFailure().ok() || (draining_ && !told_draining)) return true;
            const auto& decided = job_->steps.has_value() ? job_->steps->last_decision()
                                                          : std::optional<scheduler::Decision>();
            return decided.has_value() && decided->attempt.value() > told_attempt &&
                   decided->verdict != scheduler::Verdict::kRefuse;
          },
          Deadline::max(), cancelled);
      if (!something.ok()) return something.status();
      if (!found.ok()) return found.status();
      if (absl::Status failure = JobFailure(); !failure.ok()) {
        event.set_job_ended(std::string(failure.message()));
      } else if (draining_ && !told_draining) {
        told_draining = true;
        event.set_draining("the daemon is leaving");
      } else {
        const scheduler::Decision& decided = *job_->steps->last_decision();
        told_attempt = decided.attempt.value();
        *event.mutable_outcome() = ToProto(decided.outcome);
      }
    }
    if (!write(event) || event.has_job_ended()) return absl::OkStatus();
  }
}

}  // namespace dmuond::server
