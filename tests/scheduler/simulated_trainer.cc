#include "tests/scheduler/simulated_trainer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/reason.h"
#include "tests/scheduler/simulated_coordinator.h"
#include "tests/scheduler/simulated_member.h"
#include "tests/scheduler/step_group.h"

namespace dmuond::scheduler::testing {
namespace {

constexpr int64_t kPatienceMaxMs = 500;  // between two questions
constexpr int32_t kRestartsMax = 40;
constexpr Microseconds kRegisterTimeout = 60'000 * kMillisecond;

}  // namespace

void SimulatedTrainer::BeginAttached(Attempt attempt) {
  attempt_ = attempt;
  incarnation_ = 1;
  const uint64_t call = ++call_;
  Again(0, 5, [this, call] {
    if (call_ == call) Begin();
  });
}

void SimulatedTrainer::Again(int64_t low_ms, int64_t high_ms, Event event) {
  simulation_.time.After(simulation_.chance.Pick(low_ms * kMillisecond, high_ms * kMillisecond),
                         std::move(event));
}

void SimulatedTrainer::AskAgain(Event event) {
  if (asked_since_ < 0) {
    asked_since_ = simulation_.time.now();
    patience_ms_ = 5;
  }
  if (simulation_.time.now() - asked_since_ > kRegisterTimeout) {
    return Refused(WithReason(absl::DeadlineExceededError("RANKS_MISSING"), "RANKS_MISSING"));
  }
  Again(1, patience_ms_, std::move(event));
  patience_ms_ = std::min(kPatienceMaxMs, 2 * patience_ms_);
}

// ---- a process begins, and ends ----

// Its calls on their way are not heard any more, and its node notices.
void SimulatedTrainer::Die(const std::string& why) {
  if (!alive_ || ended_ || finished_) return;
  simulation_.Trace("rank ", rank_.value(), " dies: ", why);
  alive_ = false;
  asked_since_ = -1;
  ++call_;
  early_.clear();
  hangs_at_ = StepId(-1);
  member_.Leave(rank_, incarnation_, why);
  if (!replaced_) {
    ended_ = true;
    simulation_.disturbed = true;
    return;
  }
  ++simulation_.counts.replacements;
  Again(0, 500, [this, call = call_] {
    if (call_ == call) Start();
  });
}

void SimulatedTrainer::StartAnew(bool discards) {
  simulation_.Trace("rank ", rank_.value(), " is started anew");
  comes_late_ = ended_;
  alive_ = false;
  ended_ = false;
  finished_ = false;
  replaced_ = true;
  has_trained_ = false;
  discards_ = discards;
  restarts_ = 0;
  asked_since_ = -1;
  hangs_at_ = StepId(-1);
  early_.clear();
  const uint64_t call = ++call_;
  member_.Leave(rank_, incarnation_, "all ranks are started anew");
  Again(0, 500, [this, call] {
    if (call_ == call) Start();
  });
}

void SimulatedTrainer::DaemonDied() {
  early_.clear();
  if (!alive_ || ended_) return;
  finished_ = false;
  asked_since_ = -1;
  hangs_at_ = StepId(-1);
  lives_on_ = true;
  const uint64_t call = ++call_;
  Again(0, 50, [this, call] { Open(call); });
}

void SimulatedTrainer::JobWentBack(const WayBack& back) {
  if (!finished_) return;
  finished_ = false;
  const uint64_t call = ++call_;
  Again(0, 50, [this, call, back] { Acknowledge(call, back); });
}

void SimulatedTrainer::Start() {
  alive_ = true;
  lives_on_ = false;
  Open(++call_);
}

void SimulatedTrainer::Open(uint64_t call) {
  if (call_ != call) return;
  auto opened = member_.Open(rank_, has_trained_ ? v1::OpenSessionRequest::RESUME_REQUIRE
                                    : discards_  ? v1::OpenSessionRequest::RESUME_DISCARD
                                                 : v1::OpenSessionRequest::RESUME_IF_PRESENT);
  if (!opened) return AskAgain([this, call] { Open(call); });
  asked_since_ = -1;
  comes_late_ = false;
  if (!opened->ok()) return Refused(opened->status());
  incarnation_ = (*opened)->incarnation;
  at_ = (*opened)->at;
  simulation_.Trace("rank ", rank_.value(), " opens, step ", at_.step.value());
  Again(0, 20, [this, call] { Attach(call); });
}

void SimulatedTrainer::Attach(uint64_t call) {
  if (call_ != call) return;
  auto attached = member_.Attach(rank_, incarnation_);
  if (!attached) return AskAgain([this, call] { Attach(call); });
  asked_since_ = -1;
  if (!attached->ok()) return Refused(attached->status());
  attempt_ = **attached;
  // A rollback to the very step that it was told may have undone a push since: it gets the weights
  // as they are.
  if (member_.history().step == at_.step) at_ = member_.history();
  simulation_.Trace("rank ", rank_.value(), " is attached");
  if (lives_on_) ++simulation_.counts.acknowledged;
  lives_on_ = false;
  Begin();
}

void SimulatedTrainer::Acknowledge(uint64_t call, const WayBack& back) {
  if (call_ != call) return;
  auto acknowledged = member_.Acknowledge(rank_, incarnation_, back);
  if (!acknowledged) return AskAgain([this, call, back] { Acknowledge(call, back); });
  asked_since_ = -1;
  if (!acknowledged->ok()) {
    const absl::Status& status = acknowledged->status();
    if (ReasonOf(status) != "ROLLED_BACK") return Refused(status);
    return Acknowledge(call, *member_.MustAcknowledge(rank_, incarnation_));
  }
  attempt_ = **acknowledged;
  at_ = member_.history();
  simulation_.Trace("rank ", rank_.value(), " goes back to step ", at_.step.value());
  if (at_.step != back.to_step)
    simulation_.Fail("went back to another step than the one it was told");
  ++simulation_.counts.acknowledged;
  Begin();
}

void SimulatedTrainer::GiveUp() {
  ended_ = true;
  ++call_;
  early_.clear();
  member_.Leave(rank_, incarnation_, "it gave up");
}

// As the trainers of tests/faults end, and as their launcher starts them again.
void SimulatedTrainer::Refused(const absl::Status& status) {
  simulation_.Trace("rank ", rank_.value(), " is refused: ", std::string(status.message()));
  asked_since_ = -1;
  const std::string reason = ReasonOf(status);
  if (reason == "STATE_LOST" || reason == "JOB_HAS_NO_STATE") {
    simulation_.invariants.StateLost(!simulation_.disk.empty());
    simulation_.disturbed = true;
    return GiveUp();
  }
  if (reason == "RANKS_MISSING") {
    if (!simulation_.disturbed) simulation_.Fail("ranks are missing that have not ended");
    return GiveUp();
  }
  // Its launcher ends all ranks when one has failed, and starts them again.
  if (reason == "SNAPSHOTS_DIFFER" && simulation_.launches > 0) {
    return simulation_.time.After(
        0, [this] { simulation_.group.coordinator->StartAnew(simulation_, /*discards=*/false); });
  }
  // Its launch has begun the job already, which is at some step.
  if (reason == "JOB_HAS_STATE") discards_ = false;
  // A node that lacks memory may have it when the job is started again. Ranks of an older launch
  // may be heard of for a while.
  if (!absl::IsUnavailable(status) && !absl::IsResourceExhausted(status) &&
      reason != "JOB_HAS_STATE" && reason != "JOB_IN_USE") {
    return simulation_.Fail(
        absl::StrCat("rank ", rank_.value(), " got ", std::string(status.message())));
  }
  if (++restarts_ > kRestartsMax) {
    return simulation_.Fail(absl::StrCat("rank ", rank_.value(), " is refused for ever: ", reason));
  }
  early_.clear();
  member_.Leave(rank_, incarnation_, "it ended with an error");
  const uint64_t call = ++call_;
  Again(50, 400, [this, call] {
    if (call_ == call) Start();
  });
}

// ---- steps ----

void SimulatedTrainer::Begin() {
  const uint64_t call = ++call_;
  early_.clear();
  if (at_.step == simulation_.options.last_step) {
    finished_ = true;
    // An outcome may have been on its way while the job went back.
    if (const auto back = member_.MustAcknowledge(rank_, incarnation_)) JobWentBack(*back);
    return;
  }
  if (at_.step == hangs_at_) return;
  submitted_ = false;
  Chance& chance = simulation_.chance;
  const Plan& plan = simulation_.world.plan;
  // The state of a job begins with the weights that are pushed.
  const bool push =
      !at_.pushed && (at_.step.value() == 0 || simulation_.FateOf(at_.step, "push", 30));
  request_ = Submission{};
  request_.rank = rank_;
  request_.attempt = attempt_;
  request_.kind = push ? AttemptKind::kPush : AttemptKind::kStep;
  request_.step = push ? at_.step : StepId(at_.step.value() + 1);
  if (!push) {
    request_.scalars = Scalars(0.1 * static_cast<double>(request_.step.value()));
    const auto parameters = static_cast<int32_t>(simulation_.world.inputs.layout.parameters.size());
    for (int32_t p = 0; p < parameters; ++p) {
      if (chance.Of(10)) request_.absent.push_back(p);
    }
    if (rank_.value() == 0 && simulation_.FateOf(request_.step, "own nan", 5)) {
      request_.not_finite = 0;
    }
  }
  const bool mistaken = mistakes_ > 0 && chance.Of(10);
  if (mistaken) {
    --mistakes_;
    if (push && chance.Of(50)) {
      request_.pushed = {0};
    } else if (!push && chance.Of(50)) {
      request_.scalars.groups[1].eps = 7;
    } else {
      request_.withdraw = true;
    }
  }
  if ((!push || mistaken) && chance.Of(50)) {  // a push after early buckets is a mistake too
    for (int32_t bucket = 0; bucket < plan.buckets; ++bucket) {
      bool absent = false;
      for (int32_t p : request_.absent) absent |= plan.parameter_bucket[p] == bucket;
      if (!absent && chance.Of(70)) early_.insert(BucketId(bucket));
    }
    member_.ProgressLanes();
  }
  simulation_.invariants.Submitted(request_);
  simulation_.time.After(chance.Pick(0, chance.Of(50) ? 100 : 10 * kMillisecond),
                         [this, call] { Submit(call, 10); });
}

// Submits, later waits, until something comes back.
void SimulatedTrainer::Submit(uint64_t call, int64_t patience) {
  if (call_ != call) return;
  const bool wait = submitted_ && simulation_.chance.Of(70);
  simulation_.network.Call([this, call, wait, request = request_, incarnation = incarnation_] {
    if (!member_.alive()) return;
    absl::StatusOr<StepAnswer> answer = member_.Step(request, incarnation, wait);
    simulation_.network.Call([this, call, answer = std::move(answer)] { Answer(call, answer); });
  });
  Again(patience, 6 * patience,
        [this, call, patience] { Submit(call, std::min(kPatienceMaxMs / 6, 2 * patience)); });
}

void SimulatedTrainer::Answer(uint64_t call, const absl::StatusOr<StepAnswer>& answer) {
  if (call_ != call) return;
  if (!answer.ok()) return Refused(answer.status());
  submitted_ = true;
  if (!answer->pending()) Finish(*answer);
}

void SimulatedTrainer::Finish(const StepAnswer& answer) {
  if (answer.outcome && answer.outcome->kind == OutcomeKind::kRolledBack) {
    early_.clear();
    return Acknowledge(++call_, {answer.outcome->to_step, answer.outcome->epoch});
  }
  if (answer.outcome && answer.outcome->kind == OutcomeKind::kAborted && !answer.outcome->retry) {
    if (!simulation_.disturbed) {
      simulation_.Fail(absl::StrCat("aborted for good: ", answer.outcome->detail));
    }
    return GiveUp();
  }
  const Decision* decision = simulation_.invariants.DecisionOf(attempt_);
  if (decision == nullptr) return simulation_.Fail("an answer without a decision");
  // A new epoch's attempts, too, are later ones.
  const Attempt next = answer.outcome ? answer.outcome->next_attempt : answer.next_attempt;
  if (next <= attempt_) return simulation_.Fail("the next attempt is not a later one");
  const bool consumed =
      decision->verdict == Verdict::kCommit || decision->verdict == Verdict::kSkip;
  const bool heard = answer.outcome && answer.outcome->kind != OutcomeKind::kAborted;
  if (heard != consumed) {
    return simulation_.Fail("a trainer heard another outcome than the one that was decided");
  }
  attempt_ = next;
  if (heard) {
    const Outcome& outcome = *answer.outcome;
    if (outcome.kind != decision->outcome.kind || outcome.attempt != decision->attempt ||
        request_.kind != decision->kind || outcome.step != request_.step) {
      return simulation_.Fail("another step was committed than the one submitted");
    }
    at_ =
        simulation_.invariants.Heard(absl::StrCat("rank ", rank_.value()), at_, decision->attempt);
    has_trained_ = has_trained_ || at_.step.value() > 0;
    if (simulation_.chance.Of(30)) {
      early_.clear();
      return AwaitWeights(++call_, decision->attempt);
    }
  }
  Begin();
}

void SimulatedTrainer::AwaitWeights(uint64_t call, Attempt attempt) {
  if (call_ != call) return;
  if (member_.EndsWait(rank_, incarnation_, attempt)) return Begin();
  if (member_.MustAcknowledge(rank_, incarnation_)) {
    return simulation_.Fail("a trainer must acknowledge, and waits for what nobody publishes");
  }
  ++simulation_.counts.weights_awaited;
  Again(1, 50, [this, call, attempt] { AwaitWeights(call, attempt); });
}

std::string SimulatedTrainer::Describe() const {
  return absl::StrCat("; rank ", rank_.value(), " attempt ", attempt_.value() >> 32, ".",
                      attempt_.value() & 0xffff, " step ", at_.step.value(), alive_ ? "" : " dead",
                      ended_ ? " ended" : "", finished_ ? " finished" : "");
}

}  // namespace dmuond::scheduler::testing
