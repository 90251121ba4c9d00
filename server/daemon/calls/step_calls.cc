// What trainers hand in, and what is decided about it.
#include "server/daemon/calls/step_calls.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "scheduler/convert/convert.h"
#include "scheduler/convert/registrations.h"
#include "scheduler/scalar_ranges.h"
#include "server/common/errors.h"
#include "server/daemon/calls/awaited.h"

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

absl::StatusOr<scheduler::StepAnswer> StepCalls::Ask(const v1::SessionKey& key,
                                                     scheduler::StepId step,
                                                     scheduler::Attempt attempt) {
  absl::StatusOr<Client*> client = core_.Find(key);
  if (!client.ok()) return client.status();
  return core_.job.AnswerOf((*client)->id, step, attempt);
}

absl::StatusOr<scheduler::StepAnswer> StepCalls::Await(const v1::SessionKey& key,
                                                       scheduler::StepId step,
                                                       scheduler::Attempt attempt,
                                                       Core::Deadline deadline,
                                                       const Core::Cancelled& cancelled) {
  absl::StatusOr<scheduler::StepAnswer> answer = absl::InternalError("not asked yet");
  absl::StatusOr<bool> answered = core_.Wait(
      [&]() DMUOND_REQUIRES(core_.mutex) {
        answer = Ask(key, step, attempt);
        return !answer.ok() || !answer->pending();
      },
      deadline, cancelled);
  if (!answered.ok()) return answered.status();
  return answer;
}

template <typename Reply>
absl::StatusOr<Reply> StepCalls::ReplyOf(const absl::StatusOr<scheduler::StepAnswer>& answer) {
  if (!answer.ok()) return answer.status();
  if (!answer->refused.ok()) return Refusal(*answer);
  Reply reply;
  if (answer->outcome.has_value()) *reply.mutable_outcome() = ToProto(*answer->outcome);
  *reply.mutable_timing() = core_.job.figures().timing;
  if constexpr (requires { reply.mutable_awaited(); }) {
    if (answer->pending()) FillAwaited(core_, *reply.mutable_awaited());
  }
  return reply;
}

template <typename Reply, typename Request>
StateMutex::LateId StepCalls::AnswerLate(
    const Request& request,
    absl::StatusOr<scheduler::StepAnswer> (StepCalls::*begin)(const Request&),
    Answer<Reply> answer) {
  // Of a call that waits: its reply once there is one.
  struct Late {
    Answer<Reply> answer;
    std::optional<absl::StatusOr<Reply>> reply;
  };
  std::optional<absl::StatusOr<Reply>> at_once;
  {
    StateLock lock(core_.mutex);
    const absl::StatusOr<scheduler::StepAnswer> begun = (this->*begin)(request);
    if (begun.ok() && begun->pending() && request.wait_ms() > 0) {
      const auto late = std::make_shared<Late>(Late{std::move(answer), std::nullopt});
      const auto ask = [this, &request]() DMUOND_REQUIRES(core_.mutex) {
        return Ask(request.key(), scheduler::StepId(request.step()),
                   scheduler::Attempt(request.attempt()));
      };
      const auto is_decided = [this, late, ask]() DMUOND_REQUIRES(core_.mutex) {
        const absl::StatusOr<scheduler::StepAnswer> known = ask();
        if (known.ok() && known->pending()) return false;
        late->reply = ReplyOf<Reply>(known);
        return true;
      };
      return core_.WaitLate({is_decided, WaitDeadline(request.wait_ms()), [this, late, ask] {
                               if (!late->reply.has_value()) {
                                 StateLock again(core_.mutex);
                                 late->reply = ReplyOf<Reply>(ask());
                               }
                               late->answer(*std::move(late->reply));
                             }});
    }
    at_once = ReplyOf<Reply>(begun);
  }
  answer(*std::move(at_once));
  return 0;
}

StateMutex::LateId StepCalls::SubmitStep(const v1::SubmitStepRequest& request,
                                         Answer<v1::SubmitStepReply> answer) {
  return AnswerLate<v1::SubmitStepReply>(request, &StepCalls::Submit, std::move(answer));
}

StateMutex::LateId StepCalls::WaitStep(const v1::WaitStepRequest& request,
                                       Answer<v1::WaitStepReply> answer) {
  return AnswerLate<v1::WaitStepReply>(request, &StepCalls::MayWait, std::move(answer));
}

void StepCalls::TellLanes() {
  if (!lanes_wait_.exchange(false, std::memory_order_relaxed)) return;
  StateLock lock(core_.mutex);
  core_.lanes.SendKept();
}

void StepCalls::Cancel(StateMutex::LateId wait) {
  StateLock lock(core_.mutex);
  core_.mutex.EndLate(wait);
}

absl::StatusOr<scheduler::StepAnswer> StepCalls::Submit(const v1::SubmitStepRequest& request) {
  if (request.trainer_state().size() > kTrainerStateMax) {
    return Error(absl::StatusCode::kInvalidArgument, "TRAINER_STATE_TOO_LONG",
                 Say("trainer_state has ", Named("bytes", request.trainer_state().size()),
                     " bytes; at most ", Named("bytes_max", kTrainerStateMax), " are allowed"));
  }
  absl::StatusOr<Client*> found = core_.Find(request.key());
  if (!found.ok()) return found.status();
  const Client& client = **found;
  const scheduler::RankTable::Session& session = core_.SessionOf(client);
  const scheduler::NodeJob& job = core_.held_job();
  scheduler::Submission submission;
  submission.rank = scheduler::TrainerRank(session.rank);
  submission.attempt = scheduler::Attempt(request.attempt());
  submission.step = scheduler::StepId(request.step());
  submission.scalars = FromProto(request.scalars());
  if (job.inputs() != nullptr) {
    absl::Status sane =
        CheckScalars(session.rank, submission.scalars, job.inputs()->layout.parameters);
    if (!sane.ok()) return sane;
  }
  submission.withdraw = request.withdraw();
  for (const int32_t index : request.absent()) {
    if (index < 0 || index >= static_cast<int32_t>(client.job_parameter.size())) {
      return Error(
          absl::StatusCode::kInvalidArgument, "ABSENT_OUT_OF_RANGE",
          Say("rank ", Named("rank", session.rank), " calls parameter ", Named("parameter", index),
              " absent; it registered ", Named("parameters", client.job_parameter.size())));
    }
    submission.absent.push_back(client.job_parameter[index]);
  }
  SortOnce(submission.absent);
  if (request.has_not_finite()) {
    const int32_t index = request.not_finite();
    if (index < 0 || index >= static_cast<int32_t>(client.job_parameter.size())) {
      return Error(absl::StatusCode::kInvalidArgument, "NOT_FINITE_OUT_OF_RANGE",
                   Say("rank ", Named("rank", session.rank), " calls the gradient of parameter ",
                       Named("parameter", index), " not finite; it registered ",
                       Named("parameters", client.job_parameter.size())));
    }
    submission.not_finite = client.job_parameter[index];
  }
  if (job.inputs() != nullptr && job.planned() &&
      submission.scalars.groups.size() != static_cast<size_t>(AnyOf(job.wire()).groups_size())) {
    return Error(absl::StatusCode::kInvalidArgument, "SCALARS_DIFFER",
                 Say("rank ", Named("rank", session.rank), " submits scalars of ",
                     Named("given_groups", submission.scalars.groups.size()), " groups; ",
                     Named("groups", AnyOf(job.wire()).groups_size()), " are registered"));
  }
  scheduler::node::Actions actions;
  absl::StatusOr<scheduler::StepAnswer> answer =
      core_.job.Submit(client.id, submission, request.trainer_state(), actions);
  if (!answer.ok()) return answer.status();
  core_.Do(std::move(actions));
  lanes_wait_.store(true, std::memory_order_relaxed);
  // In a group of one node, this submission may have decided the step.
  if (answer->pending()) return Ask(request.key(), submission.step, submission.attempt);
  return answer;
}

absl::StatusOr<scheduler::StepAnswer> StepCalls::MayWait(const v1::WaitStepRequest& request) {
  absl::StatusOr<Client*> found = core_.Find(request.key());
  if (!found.ok()) return found.status();
  if (core_.job.steps() == nullptr && !core_.SessionOf(**found).must_acknowledge.has_value()) {
    return Error(absl::StatusCode::kFailedPrecondition, "STEP_OUT_OF_ORDER",
                 "no step has been submitted");
  }
  return Ask(request.key(), scheduler::StepId(request.step()),
             scheduler::Attempt(request.attempt()));
}

absl::StatusOr<scheduler::StepAnswer> StepCalls::PushOnce(const v1::SessionKey& key,
                                                          const scheduler::Submission& submission,
                                                          const PushedState& state,
                                                          const Core::Cancelled& cancelled) {
  const scheduler::NodeJob& job = core_.held_job();
  if (submission.kind == scheduler::AttemptKind::kLoad && job.steps() != nullptr &&
      submission.attempt == job.steps()->open().attempt) {
    absl::Status loaded = core_.WaitUntilPublished(cancelled);
    if (!loaded.ok()) return loaded;
    loaded = tensors_.LoadPushedState(key, state, cancelled);
    if (!loaded.ok()) return loaded;
  }
  absl::StatusOr<Client*> found = core_.Find(key);
  if (!found.ok()) return found.status();
  if (absl::Status failure = job.failure(); !failure.ok()) return failure;
  scheduler::node::Actions actions;
  absl::StatusOr<scheduler::StepAnswer> answer =
      core_.job.Submit((*found)->id, submission, "", actions);
  core_.Do(std::move(actions));
  core_.lanes.SendKept();
  if (!answer.ok() || !answer->pending()) return answer;
  return Await(key, submission.step, submission.attempt,
               std::chrono::steady_clock::now() + core_.options.step_timeout, cancelled);
}

absl::StatusOr<v1::PushParametersReply> StepCalls::Push(const v1::PushParametersRequest& header,
                                                        const PushedState& state,
                                                        const Core::Cancelled& cancelled) {
  StateLock lock(core_.mutex);
  absl::StatusOr<Client*> found = core_.FindPusher(header.key());
  if (!found.ok()) return found.status();
  const Client& client = **found;
  const scheduler::RankTable::Session& session = core_.SessionOf(client);
  const scheduler::NodeJob& job = core_.held_job();
  scheduler::Submission submission;
  submission.rank = scheduler::TrainerRank(session.rank);
  submission.kind = header.state() ? scheduler::AttemptKind::kLoad : scheduler::AttemptKind::kPush;
  submission.attempt =
      header.attempt() == 0 ? job.steps()->open().attempt : scheduler::Attempt(header.attempt());
  submission.step = scheduler::StepId(header.step());
  if (!header.all_weights() && !header.state()) {
    absl::flat_hash_map<absl::string_view, int32_t> job_parameter;
    for (int i = 0; i < session.registration.parameters_size(); ++i) {
      job_parameter.emplace(session.registration.parameters(i).name(), client.job_parameter[i]);
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
  const auto lies_there = [&](scheduler::Attempt next) DMUOND_REQUIRES(core_.mutex) {
    return submission.kind == scheduler::AttemptKind::kLoad || !job.has_state() ||
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
                     Named("timeout_ms", core_.options.step_timeout.count()), " ms. Missing: ",
                     Named("missing", MissingRanks(core_, [&job](const auto* one) {
                             return one != nullptr && job.steps() != nullptr &&
                                    job.steps()->submitted(scheduler::TrainerRank(one->rank));
                           }))));
  }
  if (answer->outcome->kind == scheduler::OutcomeKind::kRolledBack) {
    return scheduler::NodeJob::RolledBackError(
        submission.rank.value(),
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
  reply.set_last_committed_step(job.steps()->last_committed().value());
  return reply;
}

}  // namespace dmuond::server
