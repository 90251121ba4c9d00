// Knows which lanes take part when a bucket crosses a rail, and when all of them are ready. Pure.
#ifndef DMUOND_SCHEDULER_STEP_RAILS_H_
#define DMUOND_SCHEDULER_STEP_RAILS_H_

#include <cstdint>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "scheduler/plan.h"
#include "scheduler/step.h"
#include "scheduler/types.h"

namespace dmuond::scheduler {

// Nodes of a group, a bit each.
class NodeSet {
 public:
  // REQUIRES: the rank is not negative.
  void Add(NodeRank node) {
    const size_t word = Word(node);
    if (word >= words_.size()) words_.resize(word + 1);
    words_[word] |= Bit(node);
  }
  [[nodiscard]] bool contains(NodeRank node) const {
    const size_t word = Word(node);
    return word < words_.size() && (words_[word] & Bit(node)) != 0;
  }
  // Every node of `others` is in this set.
  [[nodiscard]] bool Includes(const NodeSet& others) const {
    for (size_t i = 0; i < others.words_.size(); ++i) {
      if ((others.words_[i] & ~(i < words_.size() ? words_[i] : 0)) != 0) return false;
    }
    return true;
  }
  [[nodiscard]] bool empty() const { return words_.empty(); }  // nothing is ever taken out

 private:
  static size_t Word(NodeRank node) { return static_cast<size_t>(node.value()) / 64; }
  static uint64_t Bit(NodeRank node) { return uint64_t{1} << (node.value() % 64); }

  absl::InlinedVector<uint64_t, 2> words_;
};

// By rail, then by bucket: the nodes whose lanes send or receive any of the bucket's messages. An
// empty set: it has none.
using RailTable = std::vector<std::vector<NodeSet>>;
struct RailTables {
  RailTable partials;
  RailTable weights;
  RailTable adopts;
  RailTable partial_senders;  // of `partials`, the nodes that send any

  [[nodiscard]] bool SendsPartials(LaneIndex rail, BucketId bucket, NodeRank node) const;
};
[[nodiscard]] absl::StatusOr<RailTables> MakeRailTables(const PlanInputs& inputs, const Plan& plan);

// How many buckets have messages, summed over the rails.
[[nodiscard]] int32_t CountBuckets(const RailTable& table);

// Lets the buckets of one operation of one attempt cross: each once, when all lanes with a part in
// it have reported, and on every rail in the order of buckets.
class RailGate {
 public:
  RailGate() = default;  // lets nothing cross
  RailGate(int32_t rails, int32_t buckets) : buckets_(buckets), rails_(rails) {}

  // Rails and buckets that there are not are ignored.
  void Report(LaneIndex rail, const BucketRun& run, NodeRank node);
  // The buckets of `rail` that may go by now and have not been taken before.
  [[nodiscard]] BucketRuns Take(LaneIndex rail, const RailTable& table);
  // How many have been taken, on all rails.
  [[nodiscard]] int32_t taken() const { return taken_; }

 private:
  struct Rail {
    std::vector<NodeSet> reported;  // by bucket; empty: none yet
    int32_t next = 0;               // all buckets before it have gone, or have nothing to send
  };
  [[nodiscard]] bool HasRail(LaneIndex rail) const {
    return rail.value() >= 0 && rail.value() < static_cast<int32_t>(rails_.size());
  }

  int32_t buckets_ = 0;
  std::vector<Rail> rails_;
  int32_t taken_ = 0;
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_STEP_RAILS_H_
