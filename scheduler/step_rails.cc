#include "scheduler/step_rails.h"

#include <algorithm>

namespace dmuond::scheduler {

absl::StatusOr<RailTables> MakeRailTables(const PlanInputs& inputs, const Plan& plan) {
  RailTables tables;
  for (RailTable* table :
       {&tables.partials, &tables.weights, &tables.adopts, &tables.partial_senders}) {
    table->resize(inputs.lanes_per_node);
  }
  if (inputs.nodes == 1) return tables;
  for (const Unit& unit : plan.units) {
    auto transfers = TransfersOf(inputs, plan, unit.id);
    if (!transfers.ok()) return transfers.status();
    const int32_t rail = unit.owner.value() % inputs.lanes_per_node;
    const auto add = [&](RailTable& table, const std::vector<Transfer>& messages) {
      for (const Transfer& t : messages) {
        std::set<NodeRank>& nodes = table[rail][unit.bucket];
        nodes.insert(NodeRank(t.from.value() / inputs.lanes_per_node));
        nodes.insert(NodeRank(t.to.value() / inputs.lanes_per_node));
      }
    };
    add(tables.partials, transfers->partials);
    for (const Transfer& t : transfers->partials) {
      tables.partial_senders[rail][unit.bucket].insert(
          NodeRank(t.from.value() / inputs.lanes_per_node));
    }
    add(tables.weights, transfers->weights);
    add(tables.adopts, transfers->adopts);
  }
  return tables;
}

bool RailTables::SendsPartials(LaneIndex rail, BucketId bucket, NodeRank node) const {
  if (rail.value() < 0 || rail.value() >= static_cast<int32_t>(partial_senders.size()))
    return false;
  const auto& buckets = partial_senders[rail.value()];
  const auto senders = buckets.find(bucket);
  return senders != buckets.end() && senders->second.contains(node);
}

void RailGate::Report(LaneIndex rail, BucketId bucket, NodeRank node) {
  if (rail.value() < 0 || rail.value() >= rails()) return;
  rails_[rail.value()].reported[bucket].insert(node);
}

std::vector<BucketId> RailGate::Take(LaneIndex rail, const RailTable& table) {
  std::vector<BucketId> taken;
  if (rail.value() < 0 || rail.value() >= rails()) return taken;
  Rail& state = rails_[rail.value()];
  const auto& buckets = table[rail.value()];
  for (auto it = buckets.lower_bound(state.next); it != buckets.end(); ++it) {
    const auto reported = state.reported.find(it->first);
    if (reported == state.reported.end() ||
        !std::includes(reported->second.begin(), reported->second.end(), it->second.begin(),
                       it->second.end())) {
      break;
    }
    taken.push_back(it->first);
    state.next = BucketId(it->first.value() + 1);
  }
  return taken;
}

}  // namespace dmuond::scheduler
