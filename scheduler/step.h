// The messages of the step protocol as plain values, for its two state machines
// (step_coordinator.h, step_member.h). scheduler/convert translates them from and to dmuond.v1.
#ifndef DMUOND_SCHEDULER_STEP_H_
#define DMUOND_SCHEDULER_STEP_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "scheduler/reason.h"
#include "scheduler/types.h"

namespace dmuond::scheduler {

// Time as it is passed in; no machine reads a clock.
using TimePoint = std::chrono::steady_clock::time_point;

enum class AttemptKind : uint8_t { kStep = 1, kPush = 2, kLoad = 3 };

struct GroupScalars {
  double learning_rate = 0;
  double weight_decay = 0;
  double momentum = 0;
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
};
struct StepScalars {
  std::vector<GroupScalars> groups;
  double loss_scale = 1;
  double max_grad_norm = 0;
  bool clip_muon = true;
};
// The first field that differs bit by bit ("groups[1].learning_rate"), with both values; empty:
// equal.
struct ScalarMismatch {
  std::string field;
  double first = 0;
  double second = 0;
};
[[nodiscard]] std::optional<ScalarMismatch> Compare(const StepScalars& a, const StepScalars& b);

struct AbsentFragment {
  TrainerRank rank;
  int32_t parameter = 0;  // index into Layout::parameters
  auto operator<=>(const AbsentFragment&) const = default;
};

// A rank hands in a step, or pushes.
struct Submission {
  TrainerRank rank;
  Attempt attempt;
  StepId step;
  AttemptKind kind = AttemptKind::kStep;
  StepScalars scalars;
  std::vector<int32_t> absent;  // parameters, ascending
  std::vector<int32_t> pushed;  // kPush: parameters, ascending; empty: all
  bool withdraw = false;
  // A parameter whose gradient at this rank is not finite, which no lane reads.
  std::optional<int32_t> not_finite;
};

// The sum of squares of the update of a matrix, before the learning rate.
struct UnitUpdate {
  UnitId unit;
  double squares = 0;
};

// Sums of squares of one unit's reduced gradient; see dmuond.v1.UnitNorms.
struct UnitNorm {
  UnitId unit;
  int64_t first_block = 0;
  absl::InlinedVector<double, 1> sums;  // a matrix has one
  int64_t first_element = 0;
};

enum class OutcomeKind : uint8_t { kCommitted = 1, kSkipped = 2, kAborted = 3, kRolledBack = 4 };
enum class OutcomeReason : uint8_t {
  kNone = 0,
  kNonFinite = 1,
  kWithdrawn = 2,
  kTrainerMissing = 3,
  kLaneLost = 4,
  kPeerLost = 5,
  kStateLost = 6,
  kDraining = 7,
  kLayoutChanged = 8
};
struct Outcome {
  OutcomeKind kind = OutcomeKind::kAborted;
  StepId step;
  Attempt attempt;
  OutcomeReason reason = OutcomeReason::kNone;
  std::string detail;
  bool retry = false;
  Attempt next_attempt;
  std::optional<StepId> durable_step;
  StepId to_step;
  GroupEpoch epoch;  // kRolledBack: that began with it
  double gradient_norm = 0;
  double clip_coefficient = 1;
  int64_t matrices = 0;
};

enum class Verdict : uint8_t { kCommit = 1, kSkip = 2, kAbort = 3, kRefuse = 4 };

// Gathering delays a GO by a twentieth of the last backward pass, within these bounds. A message
// costs the coordinator about 10 us, so that a group of 1,000 nodes that reports every 20 ms keeps
// it half busy; a first step that compiles for a minute must not make the second one wait for
// seconds.
inline constexpr std::chrono::microseconds kGatherMin{1'000};
inline constexpr std::chrono::microseconds kGatherMax{20'000};
inline constexpr int32_t kGatherParts = 20;

// What the coordinator tells every member.
struct OpenAttempt {
  Attempt attempt;
  StepId step;
  std::chrono::microseconds gather{0};  // see dmuond.v1.OpenAttempt
};
enum class RailOperation : uint8_t { kCollect = 1, kPublish = 2 };
// `count` buckets from `first` on.
struct BucketRun {
  BucketId first;
  int32_t count = 0;
  [[nodiscard]] BucketId end() const { return BucketId(first.value() + count); }
  bool operator==(const BucketRun&) const = default;
};
using BucketRuns = absl::InlinedVector<BucketRun, 2>;
// Appends the run, or the runs; one that follows the last of `runs` makes that longer.
void Append(BucketRuns& runs, const BucketRun& run);
void Append(BucketRuns& runs, const BucketRuns& more);

// A lane's parts of these buckets lie ready to cross.
struct RailReady {
  Attempt attempt;
  LaneIndex rail;
  RailOperation operation = RailOperation::kCollect;
  AttemptKind kind = AttemptKind::kStep;  // kCollect
  BucketRuns buckets;
};
struct Go {
  Attempt attempt;
  LaneIndex rail;
  RailOperation operation = RailOperation::kCollect;
  AttemptKind kind = AttemptKind::kStep;  // kCollect
  BucketRuns buckets;                     // ascending
  bool last = false;                      // nothing more of the operation is to go on any rail
  std::vector<AbsentFragment> absent;     // kCollect: of the parameters in these buckets
};
// The first submission of an attempt, for a node without trainers, whose lanes would not hear of
// any.
struct Begun {
  NodeRank node;
  Submission submission;
};
struct Decision {
  Attempt attempt;
  StepId step;
  AttemptKind kind = AttemptKind::kStep;
  Verdict verdict = Verdict::kAbort;
  Outcome outcome;      // kCommit, kSkip, kAbort
  StepScalars scalars;  // kCommit of a step
  double clip_coefficient = 1;
  std::vector<AbsentFragment> absent;
  std::vector<int32_t> pushed;
  std::string refuse_reason;   // kRefuse: "SCALARS_DIFFER", "PUSH_DIFFERS"
  std::string refuse_message;  // names the field, two ranks and both values
  Metadata refuse_metadata;    // the same for programs
  bool lost = false;           // kAbort: the job is given up, and so ends every later attempt
};
// A rank has not submitted this attempt in time and counts as dead, whatever its process does. Its
// daemon ends the rank's session, unless that began with a later attempt.
struct Expel {
  TrainerRank rank;
  Attempt attempt;
  std::string detail;
};
// The state is that of `step`, and every trainer is to get its weights, under this attempt: after a
// new epoch, or from a snapshot.
struct Republish {
  Attempt attempt;
  StepId step;
};
// A node has not voted for so long after the last submission that something there hangs. The node
// ends the lane or the session that keeps it waiting.
struct GatherOverdue {
  NodeRank node;
  Attempt attempt;
  std::string detail;
};
using CoordinatorAction =
    std::variant<OpenAttempt, Go, Decision, Begun, Expel, Republish, GatherOverdue>;

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_STEP_H_
