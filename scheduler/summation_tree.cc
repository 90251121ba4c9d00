#include "scheduler/summation_tree.h"

#include <algorithm>

namespace dmuond::scheduler {
namespace {

// Cuts the subtree of 2^level leaves at `first` until each part lies on one node. run_end[i] is the
// end of the run of leaves on one node that leaf i belongs to.
void Cut(const std::vector<NodeRank>& leaf_nodes, const std::vector<int32_t>& run_end,
         int32_t first, int level, std::vector<Subtree>& subtrees) {
  const auto total = static_cast<int32_t>(leaf_nodes.size());
  const auto end = static_cast<int32_t>(std::min<int64_t>(first + (int64_t{1} << level), total));
  if (first >= end) return;
  if (run_end[first] >= end) {
    // A part that the end of the tree cut short has the level of its last real addition.
    while (level > 0 && (int32_t{1} << (level - 1)) >= end - first) --level;
    subtrees.push_back({first, end - first, static_cast<uint8_t>(level), leaf_nodes[first]});
    return;
  }
  Cut(leaf_nodes, run_end, first, level - 1, subtrees);
  Cut(leaf_nodes, run_end, first + (int32_t{1} << (level - 1)), level - 1, subtrees);
}

}  // namespace

std::vector<Subtree> MaximalSubtrees(const std::vector<NodeRank>& leaf_nodes) {
  std::vector<Subtree> subtrees;
  const auto total = static_cast<int32_t>(leaf_nodes.size());
  if (total == 0) return subtrees;
  std::vector<int32_t> run_end(total);
  for (int32_t i = total - 1; i >= 0; --i) {
    const bool last_of_run = i + 1 == total || leaf_nodes[i + 1] != leaf_nodes[i];
    run_end[i] = last_of_run ? i + 1 : run_end[i + 1];
  }
  int level = 0;
  while ((int64_t{1} << level) < total) ++level;
  Cut(leaf_nodes, run_end, 0, level, subtrees);
  return subtrees;
}

}  // namespace dmuond::scheduler
