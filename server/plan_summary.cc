#include "server/plan_summary.h"

#include <algorithm>

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
  }
  return reply;
}

}  // namespace dmuond::server
