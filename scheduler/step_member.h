// One daemon's view of the steps. Takes each submission of its local trainers exactly once,
// collects its lanes' reports into one vote, and keeps outcomes for trainers that ask again: the
// last outcome that consumed a step number or committed a push, and those of the attempts after it,
// since a slow trainer may have missed several that were aborted. Pure.
//
// A decision names the next attempt, which is open from then on: a trainer that has heard its
// outcome may submit before OnOpen() has said so again.
#ifndef DMUOND_SCHEDULER_STEP_MEMBER_H_
#define DMUOND_SCHEDULER_STEP_MEMBER_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "scheduler/step.h"
#include "scheduler/types.h"

namespace dmuond::scheduler {

// The answer to a submission or a wait. It is exactly one of the three: an outcome, refused, or
// pending.
struct StepAnswer {
  std::optional<Outcome> outcome;
  absl::Status refused;  // not OK: trainers disagree (kRefuse); the machine is at `next_attempt`
  Attempt next_attempt;  // with `refused`
  [[nodiscard]] bool pending() const { return !outcome.has_value() && refused.ok(); }
};

class StepMember {
 public:
  // A decision with the step that its attempt was opened for.
  struct Decided {
    Decision decision;
    StepId open_step;
  };
  // All that it has come to: who has it can make another one that goes on.
  struct State {
    StepId last_committed;
    OpenAttempt open;                               // attempt 0: none yet
    std::vector<Decided> decided;                   // ascending attempts; see Remember()
    std::map<TrainerRank, Submission> submissions;  // under the open attempt
    // Norms by lane, of the open attempt. When all lanes have gathered, they are in the vote.
    std::map<LaneIndex, std::vector<UnitNorm>> gathered;
  };

  StepMember(std::vector<TrainerRank> local_ranks, int32_t local_lanes, StepId last_committed)
      : StepMember(std::move(local_ranks), local_lanes, State{.last_committed = last_committed}) {}
  StepMember(std::vector<TrainerRank> local_ranks, int32_t local_lanes, State state);

  void OnOpen(const OpenAttempt& open);
  // What to do with a rank's submission:
  //   outcome set: the step was decided already; `forward` false
  //   pending:     accepted now (forward true) or before (false, a duplicate)
  // FAILED_PRECONDITION names both numbers: a step other than the current one or the last decided
  // one, an attempt older or newer than the open one. INVALID_ARGUMENT: a duplicate that differs.
  struct Accepted {
    StepAnswer answer;
    bool forward = false;  // tell the coordinator and the lanes
  };
  [[nodiscard]] absl::StatusOr<Accepted> OnSubmission(const Submission& submission);
  // The answer of (step, attempt), if there is one. FAILED_PRECONDITION as above.
  [[nodiscard]] absl::StatusOr<StepAnswer> OnWait(TrainerRank rank, StepId step,
                                                  Attempt attempt) const;
  // A lane has all its gradients. When it was the last one of this node, returns the node's vote:
  // the norms of all lanes, one lane after the other.
  [[nodiscard]] std::optional<std::vector<UnitNorm>> OnGathered(Attempt attempt, LaneIndex lane,
                                                                std::vector<UnitNorm> norms);
  void OnDecision(const Decision& decision);

  [[nodiscard]] const State& state() const { return state_; }
  [[nodiscard]] OpenAttempt open() const;
  // This node has voted for the open attempt, which may have been decided without its hearing so.
  [[nodiscard]] bool voted() const {
    return static_cast<int32_t>(state_.gathered.size()) == local_lanes_;
  }
  [[nodiscard]] StepId last_committed() const;
  [[nodiscard]] const std::optional<Decision>& last_decision() const;
  [[nodiscard]] bool submitted(TrainerRank rank) const;  // under the open attempt
  [[nodiscard]] bool all_submitted() const {             // the same of every local rank
    return state_.submissions.size() == local_ranks_.size();
  }

 private:
  [[nodiscard]] const Decided* Find(Attempt attempt) const;
  [[nodiscard]] absl::Status CheckLocal(TrainerRank rank) const;
  [[nodiscard]] absl::Status OutOfOrder(TrainerRank rank, StepId step, StepId expected,
                                        Attempt attempt) const;
  void Open(const OpenAttempt& open);
  void Remember(const Decision& decision);

  const std::set<TrainerRank> local_ranks_;
  const int32_t local_lanes_;
  State state_;
  std::optional<Decision> last_;
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_STEP_MEMBER_H_
