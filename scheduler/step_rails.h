// Knows which lanes take part when a bucket crosses a rail, and when all of them are ready. Pure.
#ifndef DMUOND_SCHEDULER_STEP_RAILS_H_
#define DMUOND_SCHEDULER_STEP_RAILS_H_

#include <map>
#include <set>
#include <vector>

#include "absl/status/statusor.h"
#include "scheduler/plan.h"
#include "scheduler/types.h"

namespace dmuond::scheduler {

// Per rail, the buckets that have messages, ascending, each with the nodes whose lanes send or
// receive any of them.
using RailTable = std::vector<std::map<BucketId, std::set<NodeRank>>>;
struct RailTables {
  RailTable partials;
  RailTable weights;
  RailTable adopts;
  RailTable partial_senders;  // of `partials`, the nodes that send any

  [[nodiscard]] bool SendsPartials(LaneIndex rail, BucketId bucket, NodeRank node) const;
};
[[nodiscard]] absl::StatusOr<RailTables> MakeRailTables(const PlanInputs& inputs, const Plan& plan);

// Lets the buckets of one operation of one attempt cross: each once, when all lanes with a part in
// it have reported, and on every rail in the order of buckets.
class RailGate {
 public:
  RailGate() = default;  // lets nothing cross
  explicit RailGate(int32_t rails) : rails_(rails) {}

  void Report(LaneIndex rail, BucketId bucket, NodeRank node);
  // The buckets of `rail` that may go by now and have not been taken before.
  [[nodiscard]] std::vector<BucketId> Take(LaneIndex rail, const RailTable& table);
  [[nodiscard]] int32_t rails() const { return static_cast<int32_t>(rails_.size()); }

 private:
  struct Rail {
    std::map<BucketId, std::set<NodeRank>> reported;
    BucketId next;  // all buckets before it have gone, or have nothing to send
  };
  std::vector<Rail> rails_;
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_STEP_RAILS_H_
