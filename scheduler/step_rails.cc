#include "scheduler/step_rails.h"

#include <algorithm>

#include "scheduler/transfers.h"

namespace dmuond::scheduler {

absl::StatusOr<RailTables> MakeRailTables(const PlanInputs& inputs, const Plan& plan) {
  RailTables tables;
  for (RailTable* table :
       {&tables.partials, &tables.weights, &tables.adopts, &tables.partial_senders}) {
    table->assign(inputs.lanes_per_node, std::vector<NodeSet>(plan.buckets));
  }
  if (inputs.nodes == 1) return tables;
  const auto node_of = [&](LaneId lane) { return NodeRank(lane.value() / inputs.lanes_per_node); };
  for (const Unit& unit : plan.units) {
    auto transfers = TransfersOf(inputs, plan, unit.id);
    if (!transfers.ok()) return transfers.status();
    const int32_t rail = unit.owner.value() % inputs.lanes_per_node;
    const int32_t bucket = unit.bucket.value();
    const auto add = [&](RailTable& table, const std::vector<Transfer>& messages) {
      for (const Transfer& t : messages) {
        table[rail][bucket].Add(node_of(t.from));
        table[rail][bucket].Add(node_of(t.to));
      }
    };
    add(tables.partials, transfers->partials);
    for (const Transfer& t : transfers->partials) {
      tables.partial_senders[rail][bucket].Add(node_of(t.from));
    }
    add(tables.weights, transfers->weights);
    add(tables.adopts, transfers->adopts);
  }
  return tables;
}

bool RailTables::SendsPartials(LaneIndex rail, BucketId bucket, NodeRank node) const {
  if (rail.value() < 0 || rail.value() >= static_cast<int32_t>(partial_senders.size()))
    return false;
  const std::vector<NodeSet>& buckets = partial_senders[rail.value()];
  return bucket.value() >= 0 && bucket.value() < static_cast<int32_t>(buckets.size()) &&
         buckets[bucket.value()].contains(node);
}

int32_t CountBuckets(const RailTable& table) {
  int32_t count = 0;
  for (const std::vector<NodeSet>& buckets : table) {
    count += static_cast<int32_t>(
        std::count_if(buckets.begin(), buckets.end(), [](const NodeSet& b) { return !b.empty(); }));
  }
  return count;
}

void RailGate::Report(LaneIndex rail, const BucketRun& run, NodeRank node) {
  if (!HasRail(rail)) return;
  std::vector<NodeSet>& reported = rails_[rail.value()].reported;
  reported.resize(buckets_);
  const int32_t end = std::min(run.end().value(), buckets_);
  for (int32_t b = std::max(run.first.value(), 0); b < end; ++b) reported[b].Add(node);
}

BucketRuns RailGate::Take(LaneIndex rail, const RailTable& table) {
  BucketRuns taken;
  if (!HasRail(rail)) return taken;
  Rail& state = rails_[rail.value()];
  if (state.reported.empty()) return taken;
  const std::vector<NodeSet>& buckets = table[rail.value()];
  for (int32_t b = state.next; b < buckets_; ++b) {
    if (buckets[b].empty()) continue;
    if (!state.reported[b].Includes(buckets[b])) break;
    Append(taken, {BucketId(b), 1});
    state.next = b + 1;
    ++taken_;
  }
  return taken;
}

}  // namespace dmuond::scheduler
