#include "scheduler/replicated.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>
#include <utility>

#include "scheduler/lane_memory.h"
#include "scheduler/state_slots.h"

namespace dmuond::scheduler {
namespace {

// The level up to which `load` can be filled with `work` in all.
Nanoseconds WaterLevel(std::vector<Nanoseconds> load, Nanoseconds work) {
  std::sort(load.begin(), load.end());
  Nanoseconds level = load[0];
  for (size_t i = 0; i < load.size(); ++i) {
    const auto lanes = static_cast<Nanoseconds>(i + 1);
    const Nanoseconds next = i + 1 < load.size() ? load[i + 1] : level + work / lanes + 1;
    const Nanoseconds step = next - level;
    if (step > 0 && work / lanes < step) return level + (work + lanes - 1) / lanes;
    work -= step * lanes;
    level = next;
  }
  return level;
}

class Spreader {
 public:
  Spreader(const Layout& layout, const CostModel& model, LaneBudget& budget,
           std::vector<Unit>& pieces)
      : layout_(layout), model_(model), budget_(budget), pieces_(pieces) {}

  void Spread(const std::vector<HeldCell>& cells) {
    Nanoseconds work = 0;
    for (const HeldCell& cell : cells) work += PieceCost(model_, Elements(cell.box));
    level_ = WaterLevel(budget_.load, work);
    std::vector<size_t> order(cells.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return Elements(cells[a].box) > Elements(cells[b].box);
    });
    for (size_t i : order) {
      const HeldCell& cell = cells[i];
      if (Elements(cell.box) > kPieceWholeMax) {
        Cut(cell);
      } else {
        Give(cell.parameter, cell.box, LeastLoaded(cell));
      }
    }
  }

 private:
  // Work that the lane takes until it reaches the level, cut down to what its memory holds.
  [[nodiscard]] int64_t Share(size_t lane, ElementType type) const {
    const int64_t rest = std::max<Nanoseconds>(0, level_ - budget_.load[lane]);
    if (budget_.memory_bytes == 0) return rest;
    // A piece and the spare slot of its class.
    constexpr int64_t kSample = int64_t{1} << 20;
    const int64_t free_bytes = std::max<int64_t>(0, budget_.memory_bytes - budget_.bytes[lane]);
    const double elements =
        static_cast<double>(free_bytes) * kSample /
        static_cast<double>(PieceBytes(kSample, type) + SlotBytes(UnitKind::kPiece, kSample));
    const Nanoseconds time = PieceCost(model_, static_cast<int64_t>(elements));
    return std::min<int64_t>(rest, time);
  }

  void Cut(const HeldCell& cell) {
    const Parameter& parameter = layout_.parameters[cell.parameter];
    std::vector<int64_t> shares(budget_.load.size());
    for (size_t lane = 0; lane < shares.size(); ++lane) {
      shares[lane] = Share(lane, parameter.weight_type);
    }
    if (std::all_of(shares.begin(), shares.end(), [](int64_t s) { return s == 0; })) {
      std::fill(shares.begin(), shares.end(), 1);
    }
    const std::vector<Box> boxes = CutByShares(parameter.shape, cell.box, shares);
    for (size_t lane = 0; lane < boxes.size(); ++lane) {
      if (Empty(boxes[lane])) continue;
      for (const Box& box : CutBox(parameter.shape, boxes[lane], kPieceElementsMax)) {
        Give(cell.parameter, box, lane);
      }
    }
  }

  [[nodiscard]] size_t LeastLoaded(const HeldCell& cell) const {
    const ElementType type = layout_.parameters[cell.parameter].weight_type;
    const int64_t bytes = PieceBytes(Elements(cell.box), type);
    size_t best = 0;
    const auto rank = [&](size_t lane) {
      const bool full =
          budget_.memory_bytes > 0 && budget_.bytes[lane] + bytes > budget_.memory_bytes;
      return std::tuple(full, budget_.load[lane], budget_.bytes[lane]);
    };
    for (size_t lane = 1; lane < budget_.load.size(); ++lane) {
      if (rank(lane) < rank(best)) best = lane;
    }
    return best;
  }

  void Give(int32_t parameter, const Box& box, size_t lane) {
    const int64_t elements = Elements(box);
    budget_.load[lane] += PieceCost(model_, elements);
    budget_.bytes[lane] += PieceBytes(elements, layout_.parameters[parameter].weight_type);
    pieces_.push_back(MakePiece(layout_, parameter, box, LaneId(static_cast<int32_t>(lane))));
  }

  const Layout& layout_;
  const CostModel& model_;
  LaneBudget& budget_;
  std::vector<Unit>& pieces_;
  Nanoseconds level_ = 0;
};

}  // namespace

Nanoseconds PieceCost(const CostModel& model, int64_t elements) {
  return FromMicroseconds(std::ceil(model.Piece(elements) * 1e3) / 1e3);
}

int64_t PieceBytes(int64_t elements, ElementType weight_type) {
  return SlotBytes(UnitKind::kPiece, elements) + StagingBytes(elements, weight_type);
}

void SpreadReplicated(const Layout& layout, const CostModel& model,
                      const std::vector<HeldCell>& cells, LaneBudget& budget,
                      std::vector<Unit>& pieces) {
  Spreader(layout, model, budget, pieces).Spread(cells);
}

}  // namespace dmuond::scheduler
