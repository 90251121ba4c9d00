#include "kernels/cuda/small_plan.h"

#include <array>
#include <cmath>
#include <optional>
#include <span>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/newton_schulz.h"
#include "kernels/presets.h"

namespace dmuond::kernels::cuda {
namespace {

// Matrices of a round are polynomials in one matrix: numbers stand for them. What the program
// computes from the Gram matrix `r`.
double RunProgram(std::span<const Product> products, double r) {
  std::array<double, kSlots> slots;
  slots.fill(std::nan(""));
  slots[static_cast<size_t>(products[0].out)] = r;
  double last = r;
  for (const Product& p : products.subspan(1)) {
    if (p.kind != ProductKind::kSymmetric) break;
    const auto at = [&](Slot slot) {
      return slot == Slot::kNone ? 0.0 : slots[static_cast<size_t>(slot)];
    };
    last = p.alpha * at(p.a) * at(p.b) + p.beta * at(p.add) + p.gamma * at(p.add2) + p.diagonal;
    slots[static_cast<size_t>(p.out)] = last;
  }
  return last;
}

// The same by a plan's places.
double RunPlan(const SmallRound& round, double r, bool four_strips) {
  std::array<double, kSmallPlaces> places = {r, std::nan(""), std::nan("")};
  double last = r;
  for (size_t k = 0; k < round.ops.size(); ++k) {
    const SmallOp& op = round.ops[k];
    const auto at = [&](uint8_t place) { return place == kNoPlace ? 0.0 : places[place]; };
    EXPECT_FALSE(four_strips && op.b == kPartialPlace) << "op " << k;
    last = op.alpha * at(op.a) * at(op.b) + op.beta * at(op.c) + op.beta2 * at(op.c2) + op.diagonal;
    if (op.moves) {
      EXPECT_NE(op.out, kPartialPlace);
      for (const uint8_t read : {op.a, op.b, op.c, op.c2}) {
        EXPECT_NE(read, kPartialPlace);
      }
      places[kPartialPlace] = places[op.out];
    }
    places[op.out] = last;
    if (k + 1 < round.ops.size()) continue;
    if (round.applies) {
      EXPECT_EQ(op.out, 0);
    } else {
      EXPECT_LT(op.mirror, kSmallPlaces);
      EXPECT_NE(op.mirror, op.out);
      EXPECT_NE(op.mirror, op.c);
      EXPECT_NE(op.mirror, op.c2);
    }
  }
  return last;
}

TEST(SmallPlanTest, EveryRoundComputesWhatTheProgramDoes) {
  int rounds = 0;
  for (const int64_t p : {8, 64, 100, 192, 193, 256}) {
    for (const std::vector<int>& restarts :
         std::vector<std::vector<int>>{{2}, {3}, {2, 4}, {1}, {1, 2, 3, 4}, {}}) {
      for (const NewtonSchulzForm form : {NewtonSchulzForm::kGram, NewtonSchulzForm::kStandard}) {
        NewtonSchulzConfig config = FindPreset("dmuon")->newton_schulz;
        config.form = form;
        config.restarts = restarts;
        const NewtonSchulzProgram program = *BuildNewtonSchulz(config, p, 3 * p);
        const std::span<const Product> products = program.products;
        for (size_t i = 0; i < products.size(); ++i) {
          for (const bool applies : {true, false}) {
            const std::optional<SmallRound> round = PlanSmallRound(products.subspan(i), p, applies);
            ASSERT_EQ(round.has_value(), products[i].kind == ProductKind::kGram);
            if (!round.has_value()) continue;
            ++rounds;
            EXPECT_EQ(round->gram.a, products[i].a);
            EXPECT_EQ(round->applies, applies);
            const size_t apply = i + round->ops.size() + 1;
            EXPECT_EQ(round->products, apply - i + (applies ? 1 : 0));
            EXPECT_EQ(round->apply.kind, ProductKind::kApply);
            EXPECT_EQ(round->apply.out, products[apply].out);
            const double expected = RunProgram(products.subspan(i), 0.7);
            EXPECT_NEAR(RunPlan(*round, 0.7, p > 192), expected, 1e-6 * std::abs(expected));
          }
        }
      }
    }
  }
  EXPECT_EQ(rounds, 2 * 6 * (2 + 2 + 3 + 2 + 5 + 1 + 6 * 5));
}

TEST(SmallPlanTest, LargerMatricesHaveNone) {
  const NewtonSchulzProgram program =
      *BuildNewtonSchulz(FindPreset("dmuon")->newton_schulz, 257, 1000);
  EXPECT_FALSE(PlanSmallRound(program.products, 257, true).has_value());
  EXPECT_FALSE(PlanSmallRound({}, 64, true).has_value());
}

// As measured: a chip's worth of matrices, or of small ones fewer.
TEST(SmallPlanTest, RoundsPayWhereTheyWereFaster) {
  const NewtonSchulzConfig gram = FindPreset("dmuon")->newton_schulz;
  const auto pay = [&](int64_t p, int64_t q, int64_t batch) {
    return SmallRoundsPay(*BuildNewtonSchulz(gram, p, q), batch);
  };
  for (const int64_t batch : {4, 8, 14, 67}) EXPECT_FALSE(pay(256, 1536, batch)) << batch;
  for (const int64_t batch : {28, 42, 56, 66, 100, 132, 200}) {
    EXPECT_TRUE(pay(256, 1536, batch)) << batch;
  }
  EXPECT_FALSE(pay(256, 6144, 28));
  EXPECT_TRUE(pay(256, 6144, 56));
  for (const int64_t p : {64, 128, 192}) {
    for (const int64_t batch : {8, 28, 56, 132}) EXPECT_TRUE(pay(p, 1024, batch)) << p;
  }
  EXPECT_FALSE(pay(257, 1024, 56));
}

}  // namespace
}  // namespace dmuond::kernels::cuda
