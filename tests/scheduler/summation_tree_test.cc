#include "scheduler/summation_tree.h"

#include <bit>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/scheduler/property.h"

namespace dmuond::scheduler {
namespace {

using ::testing::ElementsAre;
using testing::ForAll;
using testing::Pick;

std::vector<NodeRank> Nodes(const std::vector<int32_t>& nodes) {
  std::vector<NodeRank> ranks;
  ranks.reserve(nodes.size());
  for (int32_t node : nodes) ranks.emplace_back(node);
  return ranks;
}

// The definition: adjacent pairs, then pairs of pairs; an odd last one is carried up.
float PairwiseSum(std::vector<float> values) {
  while (values.size() > 1) {
    std::vector<float> next;
    for (size_t i = 0; i + 1 < values.size(); i += 2) next.push_back(values[i] + values[i + 1]);
    if (values.size() % 2 == 1) next.push_back(values.back());
    values = std::move(next);
  }
  return values.at(0);
}

// What an owner does with the partial sums: pairs at equal levels and places, level by level.
float FinishTree(const std::vector<Subtree>& subtrees, const std::vector<float>& sums,
                 int32_t leaves) {
  struct Node {
    int32_t first;
    float sum;
  };
  std::vector<Node> done;
  size_t next = 0;
  for (int level = 0;; ++level) {
    // All partial sums of this level join the nodes that the level below left, in order.
    std::vector<Node> here;
    size_t i = 0;
    while (i < done.size()) {
      const int32_t parent = done[i].first >> level << level;
      if (i + 1 < done.size() && done[i + 1].first >> level << level == parent) {
        here.push_back({parent, done[i].sum + done[i + 1].sum});
        i += 2;
      } else {
        here.push_back({parent, done[i].sum});
        ++i;
      }
    }
    done = std::move(here);
    for (next = 0; next < subtrees.size(); ++next) {
      if (subtrees[next].level != level) continue;
      auto at = done.begin();
      while (at != done.end() && at->first < subtrees[next].first) ++at;
      done.insert(at, {subtrees[next].first, sums[next]});
    }
    if ((int64_t{1} << level) >= leaves) break;
  }
  return done.at(0).sum;
}

TEST(SummationTreeTest, AnyDistributionOfLeavesGivesTheSameBits) {
  ForAll(30000, [] {
    const auto leaves = static_cast<int32_t>(Pick(1, 40));
    const int64_t nodes = Pick(1, 4);
    std::vector<NodeRank> leaf_nodes;
    std::vector<float> values;
    int64_t node = 0;
    for (int32_t i = 0; i < leaves; ++i) {
      if (Pick(0, 2) == 0) node = Pick(0, nodes - 1);  // runs of some length
      leaf_nodes.emplace_back(static_cast<int32_t>(node));
      values.push_back(static_cast<float>(Pick(-1000, 1000)) *
                       std::bit_cast<float>(static_cast<uint32_t>(Pick(100, 150)) << 23));
    }
    const std::vector<Subtree> subtrees = MaximalSubtrees(leaf_nodes);
    std::vector<float> sums;
    int32_t next = 0;
    for (const Subtree& s : subtrees) {
      RC_ASSERT(s.first == next);
      RC_ASSERT(s.first % (1 << s.level) == 0);
      RC_ASSERT(s.leaves == 1 << s.level || s.first + s.leaves == leaves);
      RC_ASSERT(s.leaves <= 1 << s.level);
      for (int32_t i = s.first; i < s.first + s.leaves; ++i) RC_ASSERT(leaf_nodes[i] == s.node);
      sums.push_back(PairwiseSum({values.begin() + s.first, values.begin() + s.first + s.leaves}));
      next = s.first + s.leaves;
    }
    RC_ASSERT(next == leaves);
    const float direct = PairwiseSum(values);
    const float finished = FinishTree(subtrees, sums, leaves);
    RC_ASSERT(std::bit_cast<uint32_t>(direct) == std::bit_cast<uint32_t>(finished));
  });
}

TEST(SummationTreeTest, SubtreesAreMaximal) {
  ForAll(5000, [] {
    std::vector<NodeRank> leaf_nodes;
    const int64_t leaves = Pick(1, 33);
    for (int64_t i = 0; i < leaves; ++i) leaf_nodes.emplace_back(static_cast<int32_t>(Pick(0, 1)));
    const std::vector<Subtree> subtrees = MaximalSubtrees(leaf_nodes);
    for (size_t i = 0; i + 1 < subtrees.size(); ++i) {
      const Subtree& a = subtrees[i];
      const Subtree& b = subtrees[i + 1];
      const bool siblings = a.level == b.level && (a.first >> a.level) % 2 == 0;
      RC_ASSERT(!(siblings && a.node == b.node));
    }
  });
}

TEST(SummationTreeTest, AlignedNodesSendOneSumEach) {
  const auto subtrees = MaximalSubtrees(Nodes({0, 0, 0, 0, 1, 1, 1, 1}));
  EXPECT_THAT(subtrees, ElementsAre(Subtree{0, 4, 2, NodeRank(0)}, Subtree{4, 4, 2, NodeRank(1)}));
}

TEST(SummationTreeTest, ALoneLastLeafIsOneLeaf) {
  const auto subtrees = MaximalSubtrees(Nodes({0, 0, 0, 0, 1}));
  EXPECT_THAT(subtrees, ElementsAre(Subtree{0, 4, 2, NodeRank(0)}, Subtree{4, 1, 0, NodeRank(1)}));
}

TEST(SummationTreeTest, UnalignedNodesSendSeveralSums) {
  const auto subtrees = MaximalSubtrees(Nodes({0, 0, 0, 1, 1, 1}));
  EXPECT_THAT(subtrees, ElementsAre(Subtree{0, 2, 1, NodeRank(0)}, Subtree{2, 1, 0, NodeRank(0)},
                                    Subtree{3, 1, 0, NodeRank(1)}, Subtree{4, 2, 1, NodeRank(1)}));
}

TEST(SummationTreeTest, NoLeavesNoSubtrees) { EXPECT_TRUE(MaximalSubtrees({}).empty()); }

}  // namespace
}  // namespace dmuond::scheduler
