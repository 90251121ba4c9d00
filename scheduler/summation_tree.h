// The fixed order of summation: one binary tree over the contributing trainer ranks of a cell
// (adjacent pairs, then pairs of pairs; an odd last one is carried up), wherever they sit. Each
// node sends the owner the sums of the maximal subtrees that it holds entirely; the owner finishes
// the tree. So the result has the same bits on any number of nodes.
#ifndef DMUOND_SCHEDULER_SUMMATION_TREE_H_
#define DMUOND_SCHEDULER_SUMMATION_TREE_H_

#include <cstdint>
#include <vector>

#include "scheduler/types.h"

namespace dmuond::scheduler {

// An aligned subtree: leaves [first, first + leaves) of the tree, first a multiple of 2^level, and
// leaves == 2^level unless the tree ends before.
struct Subtree {
  int32_t first = 0;
  int32_t leaves = 1;
  uint8_t level = 0;
  NodeRank node;  // who holds all its leaves
  bool operator==(const Subtree&) const = default;
};

// Partition of the leaves into maximal subtrees that each lie on one node, in order of `first`.
// `leaf_nodes[i]` is the node of the i-th contributing rank.
[[nodiscard]] std::vector<Subtree> MaximalSubtrees(const std::vector<NodeRank>& leaf_nodes);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_SUMMATION_TREE_H_
