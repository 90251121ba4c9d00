#include "scheduler/placement.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

namespace dmuond::scheduler {
namespace {

class Placer {
 public:
  Placer(const Layout& layout, const Members& members, std::vector<std::vector<int32_t>> counts,
         std::vector<Unit>& units)
      : layout_(layout),
        members_(members),
        left_(std::move(counts)),
        units_(units),
        near_node_(members.nodes, 0),
        near_lane_(members.lanes(), 0),
        near_lane_sum_(left_.empty() ? 0 : left_[0].size(),
                       std::vector<int64_t>(members.lanes(), 0)),
        class_size_(near_lane_sum_.size(), 0),
        in_bucket_(members.lanes(), 0) {}

  // Two passes: whoever finds a place on the best node takes it before those that have no such
  // place any more take what is left.
  void Run(const std::vector<std::vector<int32_t>>& holders, const std::vector<int32_t>& class_of) {
    std::vector<int32_t> order(units_.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      if (units_[a].bucket != units_[b].bucket) return units_[a].bucket < units_[b].bucket;
      return units_[a].rows * units_[a].cols > units_[b].rows * units_[b].cols;
    });
    for (int32_t u : order) {
      MeasureNearness(units_[u], holders[u]);
      ++class_size_[class_of[u]];
      for (int32_t lane = 0; lane < members_.lanes(); ++lane) {
        near_lane_sum_[class_of[u]][lane] += near_lane_[lane];
      }
    }
    std::vector<int32_t> deferred;
    StartPass();
    for (int32_t u : order) {
      if (!PlaceOne(u, holders[u], class_of[u], /*only_best_node=*/true)) deferred.push_back(u);
    }
    StartPass();
    for (int32_t u : deferred) {
      PlaceOne(u, holders[u], class_of[u], /*only_best_node=*/false);
    }
  }

 private:
  void StartPass() {
    bucket_ = BucketId(-1);
    std::fill(in_bucket_.begin(), in_bucket_.end(), 0);
  }

  bool PlaceOne(int32_t u, const std::vector<int32_t>& holders, int32_t k, bool only_best_node) {
    Unit& unit = units_[u];
    if (unit.bucket != bucket_) {
      std::fill(in_bucket_.begin(), in_bucket_.end(), 0);
      bucket_ = unit.bucket;
    }
    MeasureNearness(unit, holders);
    const int64_t best_node = *std::max_element(near_node_.begin(), near_node_.end());
    int32_t best = -1;
    for (int32_t lane = 0; lane < members_.lanes(); ++lane) {
      if (left_[lane][k] == 0) continue;
      if (only_best_node && near_node_[lane / members_.lanes_per_node] < best_node) continue;
      if (best < 0 || Rank(lane, k) < Rank(best, k)) best = lane;
    }
    if (best < 0) return false;
    --left_[best][k];
    in_bucket_[best] += unit.rows * unit.cols;
    unit.owner = LaneId(best);
    return true;
  }

  // Smaller is better. How near a lane is counts against its mean over the class: the lane of a
  // trainer that holds a part of everything gains nothing by taking one matrix rather than another.
  [[nodiscard]] std::tuple<int64_t, __int128, int64_t, int32_t, int32_t> Rank(int32_t lane,
                                                                              int32_t k) const {
    const __int128 nearer = static_cast<__int128>(near_lane_[lane]) * class_size_[k] -
                            static_cast<__int128>(near_lane_sum_[k][lane]);
    return {-near_node_[lane / members_.lanes_per_node], -nearer, in_bucket_[lane], -left_[lane][k],
            lane};
  }

  // How many elements of the unit lie on every node, and with every lane's own trainers.
  void MeasureNearness(const Unit& unit, const std::vector<int32_t>& holders) {
    std::fill(near_node_.begin(), near_node_.end(), 0);
    std::fill(near_lane_.begin(), near_lane_.end(), 0);
    for (int32_t f : holders) {
      const Trainer& trainer = layout_.trainers[layout_.fragments[f].rank.value()];
      const int64_t elements = Elements(Intersect(layout_.fragments[f].box, unit.box));
      near_node_[trainer.node.value()] += elements;
      near_lane_[members_.HomeOf(trainer).value()] += elements;
    }
  }

  const Layout& layout_;
  const Members& members_;
  std::vector<std::vector<int32_t>> left_;
  std::vector<Unit>& units_;
  std::vector<int64_t> near_node_;
  std::vector<int64_t> near_lane_;
  std::vector<std::vector<int64_t>> near_lane_sum_;  // [class][lane], over the class's units
  std::vector<int64_t> class_size_;
  std::vector<int64_t> in_bucket_;
  BucketId bucket_;
};

}  // namespace

void Place(const Layout& layout, const Members& members,
           const std::vector<std::vector<int32_t>>& holders, const std::vector<int32_t>& class_of,
           std::vector<std::vector<int32_t>> counts, std::vector<Unit>& units) {
  Placer(layout, members, std::move(counts), units).Run(holders, class_of);
}

}  // namespace dmuond::scheduler
