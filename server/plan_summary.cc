#include "server/plan_summary.h"

#include <algorithm>

#include "scheduler/transfers.h"

namespace dmuond::server {

v1::GetPlanReply Summarize(const scheduler::Plan& plan) {
  v1::GetPlanReply reply;
  reply.set_digest(plan.digest);
  reply.set_makespan_us(plan.quality.makespan_us);
  reply.set_lower_bound_us(plan.quality.lower_bound_us);
  reply.set_gap(plan.quality.gap);
  reply.set_imbalance(plan.quality.imbalance);
  reply.set_optimal(plan.quality.optimal);
  reply.set_buckets(plan.buckets);
  for (size_t i = 0; i < plan.lane_load_us.size(); ++i) {
    v1::GetPlanReply::Lane& lane = *reply.add_lanes();
    lane.set_lane(static_cast<int32_t>(i));
    lane.set_load_us(plan.lane_load_us[i]);
    lane.set_memory_bytes(plan.lane_memory_bytes[i]);
  }
  for (const scheduler::Unit& unit : plan.units) {
    v1::GetPlanReply::Lane& lane = *reply.mutable_lanes(unit.owner.value());
    if (unit.kind == scheduler::UnitKind::kMatrix) {
      lane.set_matrices(lane.matrices() + 1);
    } else {
      lane.set_pieces(lane.pieces() + 1);
    }
    lane.set_batches(std::max(lane.batches(), unit.batch + 1));
    // Weights and momentum of a matrix; weights and two moments of other parameters.
    const int64_t tensors = unit.kind == scheduler::UnitKind::kMatrix ? 2 : 3;
    const int64_t elements = scheduler::Elements(unit.box);
    lane.set_snapshot_bytes(lane.snapshot_bytes() +
                            tensors * elements * static_cast<int64_t>(sizeof(float)));
  }
  return reply;
}

absl::Status AddNetwork(const scheduler::PlanInputs& inputs, const scheduler::Plan& plan,
                        v1::GetPlanReply& reply) {
  if (inputs.nodes == 1) return absl::OkStatus();
  for (size_t i = 0; i < plan.units.size(); ++i) {
    const auto transfers =
        scheduler::TransfersOf(inputs, plan, scheduler::UnitId(static_cast<int32_t>(i)));
    if (!transfers.ok()) return transfers.status();
    for (const auto* crossing : {&transfers->partials, &transfers->weights}) {
      for (const scheduler::Transfer& transfer : *crossing) {
        v1::GetPlanReply::Lane& lane = *reply.mutable_lanes(transfer.from.value());
        lane.set_network_bytes(lane.network_bytes() + transfer.bytes);
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace dmuond::server
