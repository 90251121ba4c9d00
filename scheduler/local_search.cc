#include "scheduler/local_search.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace dmuond::scheduler {
namespace {

constexpr int32_t kMovedMax = 4;           // matrices of one class in one move
constexpr size_t kPartnersMax = 96;        // lanes looked at per move, of different contents
constexpr int64_t kLooksMax = 10'000'000;  // moves looked at in all, about 0.1 s

// `give` matrices of class k leave the slowest lane for `partner`, `take` of class k2 come back.
struct Move {
  int32_t partner = -1;
  int32_t k = 0;
  int32_t give = 0;
  int32_t k2 = 0;
  int32_t take = 0;
  Nanoseconds slower = 0;  // of the two lanes, afterwards
};

class Search {
 public:
  Search(Nanoseconds target, LaneLoads& lanes) : target_(target), lanes_(lanes) {}

  void Run() {
    while (looks_ < kLooksMax) {
      const auto& loads = lanes_.loads();
      const auto slowest =
          static_cast<int32_t>(std::max_element(loads.begin(), loads.end()) - loads.begin());
      if (lanes_.load(slowest) <= target_) return;
      const Move move = BestMove(slowest);
      if (move.partner < 0) return;
      Apply(slowest, move);
    }
  }

 private:
  // The least loaded lanes, one of each kind of contents.
  [[nodiscard]] std::vector<int32_t> Partners(int32_t slowest) const {
    std::vector<int32_t> order(lanes_.lanes());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      if (lanes_.load(a) != lanes_.load(b)) return lanes_.load(a) < lanes_.load(b);
      if (lanes_.counts()[a] != lanes_.counts()[b]) return lanes_.counts()[a] < lanes_.counts()[b];
      return a < b;
    });
    std::vector<int32_t> partners;
    for (int32_t lane : order) {
      if (lane == slowest || partners.size() == kPartnersMax) continue;
      if (!partners.empty() && lanes_.load(partners.back()) == lanes_.load(lane) &&
          lanes_.bytes()[partners.back()] == lanes_.bytes()[lane] &&
          lanes_.counts()[partners.back()] == lanes_.counts()[lane]) {
        continue;
      }
      partners.push_back(lane);
    }
    return partners;
  }

  Move BestMove(int32_t slowest) {
    Move best;
    best.slower = lanes_.load(slowest);
    for (int32_t partner : Partners(slowest)) {
      for (int32_t k = 0; k < lanes_.classes(); ++k) {
        const int32_t give_max = std::min(kMovedMax, lanes_.count(slowest, k));
        for (int32_t give = 1; give <= give_max; ++give) {
          Consider(slowest, {partner, k, give, 0, 0, 0}, best);
          for (int32_t k2 = 0; k2 < lanes_.classes(); ++k2) {
            if (k2 == k) continue;
            const int32_t take_max = std::min(kMovedMax, lanes_.count(partner, k2));
            for (int32_t take = 1; take <= take_max; ++take) {
              Consider(slowest, {partner, k, give, k2, take, 0}, best);
            }
          }
        }
      }
    }
    return best;
  }

  void Consider(int32_t slowest, Move move, Move& best) {
    ++looks_;
    Nanoseconds here = lanes_.load(slowest) + lanes_.Growth(slowest, move.k, -move.give);
    Nanoseconds there = lanes_.load(move.partner) + lanes_.Growth(move.partner, move.k, move.give);
    if (move.take > 0) {
      here += lanes_.Growth(slowest, move.k2, move.take);
      there += lanes_.Growth(move.partner, move.k2, -move.take);
    }
    move.slower = std::max(here, there);
    if (move.slower < best.slower && Fits(slowest, move)) best = move;
  }

  [[nodiscard]] bool Fits(int32_t slowest, const Move& move) const {
    int64_t here = lanes_.BytesGrowth(slowest, move.k, -move.give);
    int64_t there = lanes_.BytesGrowth(move.partner, move.k, move.give);
    if (move.take > 0) {
      here += lanes_.BytesGrowth(slowest, move.k2, move.take);
      there += lanes_.BytesGrowth(move.partner, move.k2, -move.take);
    }
    return lanes_.HasRoom(slowest, here) && lanes_.HasRoom(move.partner, there);
  }

  void Apply(int32_t slowest, const Move& move) {
    lanes_.Add(slowest, move.k, -move.give);
    lanes_.Add(move.partner, move.k, move.give);
    if (move.take > 0) {
      lanes_.Add(slowest, move.k2, move.take);
      lanes_.Add(move.partner, move.k2, -move.take);
    }
  }

  const Nanoseconds target_;
  LaneLoads& lanes_;
  int64_t looks_ = 0;
};

}  // namespace

void ImproveSlowestLane(Nanoseconds target, LaneLoads& lanes) { Search(target, lanes).Run(); }

}  // namespace dmuond::scheduler
