// Converts dmuond.v1 messages to and from the values of scheduler/ and kernels/. The daemon and its
// lanes use the same functions, so both read the wire alike.
//
//   absl::StatusOr<scheduler::LaneProgram> program = FromProto(configure.program());
//
// FromProto() fails closed: an enum value that this build does not know, or a number that does not
// fit its type, is INVALID_ARGUMENT naming the field and, where there is one, the parameter. What
// needs a second trainer or the whole layout is checked by scheduler::Validate() and
// scheduler::MergeRegistrations(). Doubles pass bit by bit. Threads: any; nothing is kept.
#ifndef DMUOND_SCHEDULER_CONVERT_CONVERT_H_
#define DMUOND_SCHEDULER_CONVERT_CONVERT_H_

#include <vector>

#include "absl/status/statusor.h"
#include "dmuond/v1/lane.pb.h"
#include "dmuond/v1/peer.pb.h"
#include "dmuond/v1/trainer.pb.h"
#include "dmuond/v1/types.pb.h"
#include "kernels/ops.h"
#include "scheduler/cost_model.h"
#include "scheduler/lane_program.h"
#include "scheduler/layout.h"
#include "scheduler/membership.h"
#include "scheduler/plan.h"
#include "scheduler/routing.h"
#include "scheduler/step.h"
#include "scheduler/types.h"

namespace dmuond {

// ---- layout ----

[[nodiscard]] v1::Slice ToProto(const scheduler::Slice& slice);
[[nodiscard]] v1::Box ToProto(const scheduler::Box& box);
// INVALID_ARGUMENT: begin and end of different length, or more than kDimsMax dimensions.
[[nodiscard]] absl::StatusOr<scheduler::Box> FromProto(const v1::Box& box);

// One trainer's registration, whose fields have not been checked against each other. A home_lane of
// -1 (any) is INVALID_ARGUMENT here: the daemon chooses a lane first.
[[nodiscard]] absl::StatusOr<scheduler::Registration> FromProto(
    const v1::Registration& registration);
// The caller adds job, world size, groups and bucket size, which the value does not have.
[[nodiscard]] v1::Registration ToProto(const scheduler::Registration& registration);

[[nodiscard]] scheduler::CostTable FromProto(const v1::CostTable& costs);
[[nodiscard]] v1::CostTable ToProto(const scheduler::CostTable& costs);

// Merges the registrations, and takes from their groups what the costs of matrices depend on.
// FAILED_PRECONDITION or INVALID_ARGUMENT as MergeRegistrations() says;
// INVALID_ARGUMENT also where two ranks gave other groups or bucket sizes (both ranks named), a
// parameter names a group that is not there, a group cannot be, or numbers of nodes and lanes are
// not positive.
[[nodiscard]] absl::StatusOr<scheduler::PlanInputs> FromProto(const v1::PlanInputs& inputs);

[[nodiscard]] v1::RoutingRow ToProto(const scheduler::RoutingRow& row, int32_t bucket);
[[nodiscard]] std::vector<v1::RoutingRow> RoutingRows(const scheduler::Layout& layout,
                                                      const scheduler::Plan& plan);

// What the lane is told can be followed without another look: checked by CheckLaneProgram().
[[nodiscard]] absl::StatusOr<scheduler::LaneProgram> FromProto(const v1::LaneProgram& program);
[[nodiscard]] v1::LaneProgram ToProto(const scheduler::LaneProgram& program);

[[nodiscard]] kernels::DType ToDType(scheduler::ElementType type);

// ---- what is computed ----

// The preset's configuration with the fields that are set in place of its own, checked by
// kernels::CheckConfig().
[[nodiscard]] absl::StatusOr<kernels::MuonConfig> FromProto(const v1::GroupConfig& config);

// What the planner's costs depend on.
[[nodiscard]] scheduler::Iteration IterationOf(const kernels::NewtonSchulzConfig& config);

// ---- steps ----

[[nodiscard]] scheduler::StepScalars FromProto(const v1::StepScalars& scalars);
[[nodiscard]] v1::StepScalars ToProto(const scheduler::StepScalars& scalars);

[[nodiscard]] absl::StatusOr<scheduler::AttemptKind> FromProto(v1::AttemptKind kind);
[[nodiscard]] v1::AttemptKind ToProto(scheduler::AttemptKind kind);
[[nodiscard]] absl::StatusOr<scheduler::RailOperation> FromProto(v1::RailOperation operation);
[[nodiscard]] v1::RailOperation ToProto(scheduler::RailOperation operation);

[[nodiscard]] scheduler::AbsentFragment FromProto(const v1::AbsentFragment& absent);
[[nodiscard]] v1::AbsentFragment ToProto(const scheduler::AbsentFragment& absent);

// Lists of parameters come out ascending, each once. The caller adds the incarnation.
[[nodiscard]] absl::StatusOr<scheduler::Submission> FromProto(const v1::RankSubmitted& submitted);
[[nodiscard]] v1::RankSubmitted ToProto(const scheduler::Submission& submission);

[[nodiscard]] scheduler::SnapshotId FromProto(const v1::SnapshotId& id);
[[nodiscard]] v1::SnapshotId ToProto(const scheduler::SnapshotId& id);

[[nodiscard]] scheduler::OpenAttempt FromProto(const v1::OpenAttempt& open);
[[nodiscard]] v1::OpenAttempt ToProto(const scheduler::OpenAttempt& open);

// INVALID_ARGUMENT: buckets that no plan has, or too many runs of them.
[[nodiscard]] absl::StatusOr<scheduler::RailReady> FromProto(const v1::RailReady& ready);
void ToProto(const scheduler::RailReady& ready, v1::RailReady& out);
// Without the absent fragments, which Goes has for all of its own.
[[nodiscard]] absl::StatusOr<scheduler::Go> FromProto(const v1::Go& go);
[[nodiscard]] v1::Go ToProto(const scheduler::Go& go);

// INVALID_ARGUMENT: fields of different lengths, or counts that the sums are not.
[[nodiscard]] absl::StatusOr<std::vector<scheduler::UnitNorm>> FromProto(
    const v1::UnitNorms& norms);
[[nodiscard]] v1::UnitNorms ToProto(const std::vector<scheduler::UnitNorm>& norms);

// What a member says of itself. MembershipMachine decides whether it may join.
[[nodiscard]] scheduler::MemberInfo FromProto(const v1::JoinRequest& join);

[[nodiscard]] absl::StatusOr<scheduler::Outcome> FromProto(const v1::Outcome& outcome);
[[nodiscard]] v1::Outcome ToProto(const scheduler::Outcome& outcome);

[[nodiscard]] absl::StatusOr<scheduler::Decision> FromProto(const v1::Decision& decision);
[[nodiscard]] v1::Decision ToProto(const scheduler::Decision& decision);

}  // namespace dmuond

#endif  // DMUOND_SCHEDULER_CONVERT_CONVERT_H_
