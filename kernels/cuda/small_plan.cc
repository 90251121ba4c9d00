#include "kernels/cuda/small_plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

namespace dmuond::kernels::cuda {
namespace {

constexpr int kNone = -1;

// A product on values that are written once; value 0 is the Gram matrix, value k + 1 op k's result.
struct ValueOp {
  int a = kNone;
  int b = kNone;
  int c = kNone;
  int c2 = kNone;

  [[nodiscard]] bool Reads(int value) const {
    return a == value || b == value || c == value || c2 == value;
  }
};

class Planner {
 public:
  Planner(std::span<const Product> products, int64_t rows, bool applies) : rows_(rows) {
    if (products.empty() || products[0].kind != ProductKind::kGram || rows > kSmallRowsMax) return;
    std::array<int, kSlots> value_of;
    value_of.fill(kNone);
    value_of[static_cast<size_t>(products[0].out)] = 0;
    const auto value = [&](Slot slot) {
      return slot == Slot::kNone ? kNone : value_of[static_cast<size_t>(slot)];
    };
    size_t at = 1;
    for (; at < products.size() && products[at].kind == ProductKind::kSymmetric; ++at) {
      const Product& p = products[at];
      if (p.input_power != 0) return;
      values_.push_back({value(p.a), value(p.b), value(p.add), value(p.add2)});
      if (values_.back().a == kNone || values_.back().b == kNone) return;
      SmallOp op;
      op.alpha = static_cast<float>(p.alpha);
      op.beta = static_cast<float>(p.beta);
      op.beta2 = static_cast<float>(p.gamma);
      op.diagonal = static_cast<float>(p.diagonal);
      round_.ops.push_back(op);
      value_of[static_cast<size_t>(p.out)] = static_cast<int>(values_.size());
    }
    const int count = static_cast<int>(values_.size());
    // What X is multiplied with is the last result, and nothing else is read afterwards.
    if (count == 0 || count > kSmallOpsMax || at == products.size() ||
        products[at].kind != ProductKind::kApply || value(products[at].a) != count ||
        products[at].b != products[0].a ||
        (at + 1 < products.size() && products[at + 1].kind != ProductKind::kGram)) {
      return;
    }
    round_.gram = products[0];
    round_.apply = products[at];
    round_.applies = applies;
    round_.products = applies ? at + 1 : at;
    valid_ = true;
  }

  std::optional<SmallRound> Plan() {
    if (!valid_) return std::nullopt;
    place_of_.assign(values_.size() + 1, kNoPlace);
    place_of_[0] = 0;
    for (size_t k = 0; k < values_.size(); ++k) {
      if (!PlaceOp(static_cast<int>(k))) return std::nullopt;
    }
    return round_;
  }

 private:
  // Whether `value` is read by an op after op k, at all or as a right operand.
  [[nodiscard]] bool ReadAfter(int value, int k) const {
    return std::any_of(values_.begin() + k + 1, values_.end(),
                       [&](const ValueOp& op) { return op.Reads(value); });
  }
  [[nodiscard]] bool RightAfter(int value, int k) const {
    return std::any_of(values_.begin() + k + 1, values_.end(),
                       [&](const ValueOp& op) { return op.b == value; });
  }
  // The value that lies in a place and is still needed after op k.
  [[nodiscard]] int Holder(int place, int k) const {
    for (int v = 0; v <= k; ++v) {
      if (place_of_[v] == place && ReadAfter(v, k)) return v;
    }
    return kNone;
  }
  // Whether op k reads what lies in a place.
  [[nodiscard]] bool ReadBy(int place, int k) const {
    for (int v = 0; v <= k; ++v) {
      if (place_of_[v] == place && values_[k].Reads(v)) return true;
    }
    return false;
  }
  [[nodiscard]] bool Partial(int place) const {
    return place == kPartialPlace && rows_ > int64_t{3} * 64;  // 192 rows are six boxes
  }

  bool PlaceOp(int k) {
    const ValueOp& values = values_[k];
    SmallOp& op = round_.ops[k];
    const auto place = [&](int value) { return value == kNone ? kNoPlace : place_of_[value]; };
    op.a = place(values.a);
    op.b = place(values.b);
    op.c = place(values.c);
    op.c2 = place(values.c2);
    if (Partial(op.b)) return false;
    const int out = k + 1;
    const bool last = out == static_cast<int>(values_.size());
    if (last && round_.applies) {
      Put(op, out, 0);  // nothing else is needed any more
      return true;
    }
    for (int to = kSmallPlaces - 1; to >= 0; --to) {
      if (Holder(to, k) != kNone || (Partial(to) && RightAfter(out, k))) continue;
      if (last && !PlaceMirror(op, to)) continue;
      Put(op, out, to);
      return true;
    }
    if (last) return false;
    // One that is only a left operand from now on makes room.
    for (int from = 0; from < kPartialPlace; ++from) {
      const int holder = Holder(from, k);
      if (holder == kNone || values.Reads(holder) || RightAfter(holder, k) ||
          Holder(kPartialPlace, k) != kNone || ReadBy(kPartialPlace, k)) {
        continue;
      }
      op.moves = true;
      place_of_[holder] = kPartialPlace;
      Put(op, out, from);
      return true;
    }
    return false;
  }

  void Put(SmallOp& op, int value, int place) {
    // Whatever lay there is not needed any more.
    for (uint8_t& other : place_of_) {
      if (other == place) other = kNoPlace;
    }
    place_of_[value] = static_cast<uint8_t>(place);
    op.out = static_cast<uint8_t>(place);
  }

  // Addends are read while mirror images are written.
  static bool PlaceMirror(SmallOp& op, int out) {
    for (int place = 0; place < kSmallPlaces; ++place) {
      if (place == out || place == op.c || place == op.c2) continue;
      op.mirror = static_cast<uint8_t>(place);
      return true;
    }
    return false;
  }

  const int64_t rows_;
  bool valid_ = false;
  std::vector<ValueOp> values_;
  std::vector<uint8_t> place_of_;
  SmallRound round_;
};

}  // namespace

std::optional<SmallRound> PlanSmallRound(std::span<const Product> products, int64_t rows,
                                         bool applies) {
  return Planner(products, rows, applies).Plan();
}

bool SmallRoundsPay(const NewtonSchulzProgram& program, int64_t batch) {
  if (program.p > kSmallRowsMax) return false;
  const auto count = [&](ProductKind kind) {
    return static_cast<double>(
        std::count_if(program.products.begin(), program.products.end(),
                      [kind](const Product& product) { return product.kind == kind; }));
  };
  // Microseconds. A matrix's chain of products takes its time however many there are, until the
  // chip is full; what they all take from memory makes it up to kCrowded longer.
  constexpr std::array<double, 4> kPerProduct = {0.5, 1.4, 2.2, 3.1};
  constexpr std::array<double, 4> kPerColumn = {0.003, 0.006, 0.009, 0.0206};
  constexpr double kPerRound = 8.5;
  constexpr double kCrowded = 0.4;
  constexpr double kMultiprocessors = 132;
  const int strips = static_cast<int>((program.p + 63) / 64);
  const double at_once = strips > 2 ? kMultiprocessors / 2 : kMultiprocessors;  // pairs of CTAs
  const double matrices = static_cast<double>(batch);
  const double columns = static_cast<double>(program.q);
  const double chain = count(ProductKind::kSymmetric) * kPerProduct[strips - 1] +
                       count(ProductKind::kGram) * (kPerRound + columns * kPerColumn[strips - 1]);
  const double rounds =
      std::ceil(matrices / at_once) * chain * (1 + kCrowded * std::min(1.0, matrices / at_once));
  // Single products: a launch each, and the work of all matrices.
  constexpr double kPerLaunch = 3.3;
  const double relative = static_cast<double>(program.p) / 256;
  const double singles = static_cast<double>(program.products.size()) * kPerLaunch +
                         matrices * relative * relative * (1.84 + 0.00095 * columns);
  return rounds < singles;
}

}  // namespace dmuond::kernels::cuda
