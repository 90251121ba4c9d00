// Copy, Fill and Sum on strided boxes against one-element-at-a-time code.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>

#include "kernels/cpu/cpu_device.h"
#include "tests/kernels/random_box.h"

namespace dmuond::kernels {
namespace {

struct Lane {
  explicit Lane(int threads) : device(*cpu::CpuDevice::Create(threads)) {
    stream = *device->CreateStream();
  }
  std::unique_ptr<cpu::CpuDevice> device;
  std::unique_ptr<Stream> stream;
};

Shape AnyShape() {
  const auto dims = *rc::gen::inRange<int>(0, 5);
  Shape shape;
  for (int d = 0; d < dims; ++d) shape.push_back(*rc::gen::inRange<int64_t>(d == 3 ? 0 : 1, 12));
  return shape;
}

// The rule of SumTask, by levels: neighbours are added, an odd last one is carried up.
std::vector<float> TreeSum(std::vector<std::vector<float>> level, std::vector<bool> present) {
  while (level.size() > 1) {
    std::vector<std::vector<float>> next;
    std::vector<bool> next_present;
    for (size_t i = 0; i < level.size(); i += 2) {
      const bool right = i + 1 < level.size() && present[i + 1];
      std::vector<float> node = present[i] || !right ? level[i] : level[i + 1];
      if (present[i] && right) {
        for (size_t k = 0; k < node.size(); ++k) node[k] = level[i][k] + level[i + 1][k];
      }
      next.push_back(std::move(node));
      next_present.push_back(present[i] || right);
    }
    level = std::move(next);
    present = std::move(next_present);
  }
  if (!present[0]) std::fill(level[0].begin(), level[0].end(), 0.0F);
  return level[0];
}

RC_GTEST_PROP(Copy, MovesEveryElementAndNothingElse, ()) {
  Lane lane(*rc::gen::inRange(1, 4));
  BoxRandom random(*rc::gen::arbitrary<uint64_t>());
  const Shape shape = AnyShape();
  OwnedBox src(shape, RandomDType(random), random);
  OwnedBox dst(shape, RandomDType(random), random);
  src.Write(RandomValues(Count(shape), random));
  RC_ASSERT(lane.device->ops().Copy(*lane.stream, dst.box(), src.box()).ok());
  OwnedBox expected(shape, dst.box().dtype, random);
  expected.Write(src.Read());
  RC_ASSERT(dst.Read() == expected.Read());
  RC_ASSERT(dst.GapsAreUntouched());
}

RC_GTEST_PROP(Fill, WritesEveryElementAndNothingElse, ()) {
  Lane lane(*rc::gen::inRange(1, 4));
  BoxRandom random(*rc::gen::arbitrary<uint64_t>());
  const Shape shape = AnyShape();
  OwnedBox dst(shape, RandomDType(random), random);
  RC_ASSERT(lane.device->ops().Fill(*lane.stream, dst.box(), 0.3F).ok());
  OwnedBox expected(shape, dst.box().dtype, random);
  expected.Write(std::vector<float>(static_cast<size_t>(Count(shape)), 0.3F));
  RC_ASSERT(dst.Read() == expected.Read());
  RC_ASSERT(dst.GapsAreUntouched());
}

RC_GTEST_PROP(Sum, IsTheFixedTreeOverPresentSources, ()) {
  Lane lane(*rc::gen::inRange(1, 4));
  BoxRandom random(*rc::gen::arbitrary<uint64_t>());
  const Shape shape = AnyShape();
  const int count = *rc::gen::inRange(1, 20);
  std::vector<OwnedBox> sources;
  std::vector<StridedBox> boxes;
  std::vector<std::vector<float>> leaves;
  std::vector<bool> present;
  for (int i = 0; i < count; ++i) {
    OwnedBox& source = sources.emplace_back(shape, RandomDType(random), random);
    source.Write(RandomValues(Count(shape), random));
    present.push_back(random() % 4 != 0);
    leaves.push_back(source.Read());
  }
  for (int i = 0; i < count; ++i) {
    boxes.push_back(present[i] ? sources[i].box() : sources[i].Absent());
  }
  OwnedBox dst(shape, DType::kF32, random);
  const float factor = random() % 2 == 0 ? 1.0F : 0.37F;
  const SumTask task{dst.box(), boxes, {}, factor};
  RC_ASSERT(lane.device->ops().Sum(*lane.stream, {&task, 1}).ok());
  std::vector<float> expected = TreeSum(leaves, present);
  for (float& x : expected) x *= factor;
  RC_ASSERT(dst.Read() == expected);
  RC_ASSERT(dst.GapsAreUntouched());
}

// Sources that are sums of subtrees already, as other nodes send them: any cut of the tree into
// aligned subtrees gives the bits of the whole.
RC_GTEST_PROP(Sum, OfPartialSumsIsTheSumOfTheirLeaves, ()) {
  Lane lane(1);
  BoxRandom random(*rc::gen::arbitrary<uint64_t>());
  const int64_t elements = *rc::gen::inRange<int64_t>(1, 50);
  const int64_t leaves = *rc::gen::inRange<int64_t>(1, 40);
  std::vector<std::vector<float>> values;
  std::vector<bool> present;
  for (int64_t i = 0; i < leaves; ++i) {
    values.push_back(RandomValues(elements, random));
    present.push_back(random() % 4 != 0);
  }
  std::vector<OwnedBox> sources;
  std::vector<StridedBox> boxes;
  std::vector<uint8_t> levels;
  sources.reserve(static_cast<size_t>(leaves));
  for (int64_t begin = 0; begin < leaves;) {
    uint8_t level = 0;
    while (random() % 2 == 0 && begin % (int64_t{2} << level) == 0 && level < 6) ++level;
    const int64_t end = std::min(leaves, begin + (int64_t{1} << level));
    const std::vector<bool> some(present.begin() + begin, present.begin() + end);
    OwnedBox& source = sources.emplace_back(Shape{elements}, DType::kF32, random);
    source.Write(TreeSum({values.begin() + begin, values.begin() + end}, some));
    const bool any = std::find(some.begin(), some.end(), true) != some.end();
    boxes.push_back(any ? source.box() : source.Absent());
    levels.push_back(level);
    begin = end;
  }
  OwnedBox dst({elements}, DType::kF32, random);
  const SumTask task{dst.box(), boxes, levels};
  RC_ASSERT(lane.device->ops().Sum(*lane.stream, {&task, 1}).ok());
  RC_ASSERT(dst.Read() == TreeSum(values, present));
}

// Large enough for several pieces and threads, with runs that cross their borders.
TEST(Sum, OfLargeBoxesDoesNotDependOnThreads) {
  BoxRandom random(5);
  const Shape shape = {3, 257, 401};
  std::vector<OwnedBox> sources;
  std::vector<std::vector<float>> leaves;
  for (int i = 0; i < 5; ++i) {
    OwnedBox& source = sources.emplace_back(shape, i == 2 ? DType::kBF16 : DType::kF32, random);
    source.Write(RandomValues(Count(shape), random));
    leaves.push_back(source.Read());
  }
  std::vector<StridedBox> boxes;
  for (const OwnedBox& source : sources) boxes.push_back(source.box());
  std::vector<float> expected = TreeSum(leaves, std::vector<bool>(5, true));
  for (const int threads : {1, 2, 3}) {
    Lane lane(threads);
    // Two tasks at once: the second one has other pieces.
    OwnedBox first(shape, DType::kF32, random);
    OwnedBox second(shape, DType::kF32, random);
    const std::vector<SumTask> tasks = {{first.box(), boxes}, {second.box(), {&boxes[1], 1}}};
    ASSERT_TRUE(lane.device->ops().Sum(*lane.stream, tasks).ok());
    EXPECT_EQ(first.Read(), expected) << threads;
    EXPECT_EQ(second.Read(), leaves[1]) << threads;
  }
}

TEST(Sum, OneSourceIsACopyOfBits) {
  BoxRandom random(6);
  const std::vector<uint32_t> bits = {0x7f800001U, 0xffc12345U, 0x80000000U, 0x00000001U};
  std::vector<uint32_t> out(bits.size());
  const auto box = [](const void* data) {
    return StridedBox{static_cast<std::byte*>(const_cast<void*>(data)), DType::kF32, 1, {4}, {1}};
  };
  const std::vector<StridedBox> sources = {StridedBox{}, box(bits.data()), StridedBox{}};
  Lane lane(1);
  const SumTask task{box(out.data()), sources};
  ASSERT_TRUE(lane.device->ops().Sum(*lane.stream, {&task, 1}).ok());
  EXPECT_EQ(out, bits);
}

TEST(Sum, NonFiniteContributionsStayVisible) {
  std::vector<float> a = {1.0F, INFINITY, 2.0F};
  std::vector<float> b = {1.0F, -INFINITY, NAN};
  std::vector<float> out(3);
  const auto box = [](std::vector<float>& values) {
    return StridedBox{reinterpret_cast<std::byte*>(values.data()), DType::kF32, 1, {3}, {1}};
  };
  const std::vector<StridedBox> sources = {box(a), box(b)};
  Lane lane(1);
  const SumTask task{box(out), sources, {}, 0.5F};
  ASSERT_TRUE(lane.device->ops().Sum(*lane.stream, {&task, 1}).ok());
  EXPECT_EQ(out[0], 1.0F);
  EXPECT_TRUE(std::isnan(out[1]));
  EXPECT_TRUE(std::isnan(out[2]));
}

TEST(MemoryOps, WrongBoxesAreRefusedBeforeAnythingIsWritten) {
  BoxRandom random(7);
  Lane lane(1);
  Ops& ops = lane.device->ops();
  OwnedBox dst({4, 5}, DType::kF32, random);
  OwnedBox other({4, 6}, DType::kF32, random);
  OwnedBox fewer({4}, DType::kF32, random);
  OwnedBox half({4, 5}, DType::kF16, random);
  const auto bad = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(ops.Copy(*lane.stream, dst.box(), other.box()).code(), bad);
  EXPECT_EQ(ops.Copy(*lane.stream, dst.box(), fewer.box()).code(), bad);
  EXPECT_EQ(ops.Copy(*lane.stream, dst.box(), dst.Absent()).code(), bad);
  EXPECT_EQ(ops.Fill(*lane.stream, dst.Absent(), 0).code(), bad);
  StridedBox deep = dst.box();
  deep.dims = kDimsMax + 1;
  EXPECT_EQ(ops.Fill(*lane.stream, deep, 0).code(), bad);
  StridedBox negative = dst.box();
  negative.shape[0] = -1;
  EXPECT_EQ(ops.Fill(*lane.stream, negative, 0).code(), bad);
  const std::vector<StridedBox> good = {dst.box()};
  const std::vector<StridedBox> wrong = {dst.box(), other.box()};
  const std::vector<SumTask> tasks = {{dst.box(), good}, {dst.box(), wrong}};
  EXPECT_EQ(ops.Sum(*lane.stream, tasks).code(), bad);
  const SumTask into_half{half.box(), good};
  EXPECT_EQ(ops.Sum(*lane.stream, {&into_half, 1}).code(), bad);
  const std::vector<StridedBox> two = {dst.box(), dst.box()};
  for (const std::vector<uint8_t>& levels :
       std::vector<std::vector<uint8_t>>{{0}, {0, 1}, {16, 0}, {200, 0}, {1, 2}}) {
    const SumTask wrong_tree{dst.box(), two, levels};
    EXPECT_EQ(ops.Sum(*lane.stream, {&wrong_tree, 1}).code(), bad);
  }
  EXPECT_TRUE(std::all_of(dst.memory().begin(), dst.memory().end(),
                          [](std::byte b) { return b == OwnedBox::kGap; }));
}

// ---- Sums of squares ----

TEST(SumsOfSquares, AreExactPerBlockWhereverATensorIsCut) {
  BoxRandom random(8);
  const int64_t elements = 3 * kNormBlock + 777;
  std::vector<float> values = RandomValues(elements, random);
  for (float& x : values) x = std::round(x * 16);  // squares add up exactly
  for (const int threads : {1, 3}) {
    Lane lane(threads);
    for (const int64_t cut : {int64_t{0}, int64_t{1}, kNormBlock, kNormBlock + 5, elements}) {
      std::vector<double> total(static_cast<size_t>(NormBlocks(0, elements)));
      std::vector<double> left(static_cast<size_t>(NormBlocks(0, cut)) + 1, NAN);
      std::vector<double> right(static_cast<size_t>(NormBlocks(cut, elements - cut)) + 1, NAN);
      const std::vector<NormTask> tasks = {
          {values.data(), cut, 0, left.data()},
          {values.data() + cut, elements - cut, cut, right.data()}};
      ASSERT_TRUE(lane.device->ops().SumsOfSquares(*lane.stream, tasks).ok());
      for (int64_t i = 0; i < NormBlocks(0, cut); ++i) total[i] += left[i];
      for (int64_t i = 0; i < NormBlocks(cut, elements - cut); ++i) {
        total[cut / kNormBlock + i] += right[i];
      }
      for (size_t block = 0; block < total.size(); ++block) {
        double expected = 0;
        for (int64_t i = static_cast<int64_t>(block) * kNormBlock;
             i < std::min<int64_t>(elements, (static_cast<int64_t>(block) + 1) * kNormBlock); ++i) {
          expected += static_cast<double>(values[i]) * values[i];
        }
        ASSERT_EQ(total[block], expected) << block << " cut at " << cut;
      }
      EXPECT_TRUE(std::isnan(left.back()) && std::isnan(right.back()));
    }
  }
}

TEST(SumsOfSquares, HoldExtremesAndNonFiniteValues) {
  Lane lane(1);
  const auto norm = [&](std::vector<float> values) {
    double sum = -1;
    const NormTask task{values.data(), static_cast<int64_t>(values.size()), 0, &sum};
    EXPECT_TRUE(lane.device->ops().SumsOfSquares(*lane.stream, {&task, 1}).ok());
    return sum;
  };
  EXPECT_DOUBLE_EQ(norm(std::vector<float>(100, 1e-30F)), 100 * std::pow(double{1e-30F}, 2));
  EXPECT_DOUBLE_EQ(norm(std::vector<float>(100, 1e30F)), 100 * std::pow(double{1e30F}, 2));
  EXPECT_TRUE(std::isnan(norm({1, 2, NAN, 4})));
  EXPECT_TRUE(std::isinf(norm({1, 2, INFINITY, 4})));
}

// What a sum finds in passing, around the cache and through it, is what a pass of its own finds.
void ExpectSquaresOfTheirOwnPass(int64_t elements, DType dtype, BoxRandom& random) {
  Lane lane(2);
  std::vector<StridedBox> boxes;
  std::vector<std::vector<float>> leaves;
  std::vector<OwnedBox> sources;
  const std::vector<float> values = RandomValues(elements, random);
  for (const size_t count : {0, 1, 2, 3, 5}) {
    while (sources.size() < count) {
      sources.emplace_back(Shape{elements}, dtype, random).Write(values);
      leaves.push_back(sources.back().Read());
    }
    boxes.clear();
    for (const OwnedBox& source : sources) boxes.push_back(source.box());
    std::vector<float> expected(elements);
    if (count > 0) expected = TreeSum(leaves, std::vector<bool>(count, true));
    for (float& x : expected) x *= 0.3F;
    for (const int64_t first : {0, 1}) {  // of dst: at the beginning of a line and not
      std::vector<float> memory(elements + 32, -7.0F);
      void* line = memory.data();
      size_t space = memory.size() * sizeof(float);
      float* const dst = static_cast<float*>(std::align(64, 64, line, space)) + first;
      std::vector<double> found(NormBlocks(0, elements), NAN);
      std::vector<double> own(found);
      SumTask task{{reinterpret_cast<std::byte*>(dst), DType::kF32, 1, {elements}, {1}}, boxes};
      task.factor = 0.3F;
      task.squares = found.data();
      ASSERT_TRUE(lane.device->ops().Sum(*lane.stream, {&task, 1}).ok());
      ASSERT_EQ(std::vector<float>(dst, dst + elements), expected);
      EXPECT_EQ(dst[elements], -7.0F);
      const NormTask norm{dst, elements, 0, own.data()};
      ASSERT_TRUE(lane.device->ops().SumsOfSquares(*lane.stream, {&norm, 1}).ok());
      ASSERT_EQ(found, own) << elements << " elements, " << count << " sources";
    }
  }
}

TEST(SumsOfSquares, OfASumHaveTheBitsOfTheirOwnPass) {
  BoxRandom random(9);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t elements : {int64_t{1000}, kNormBlock + 5, (int64_t{1} << 20) + 12365}) {
      ExpectSquaresOfTheirOwnPass(elements, dtype, random);  // the last: more than 4 MiB
    }
  }
}

// Long runs and short ones, at every distance from the beginning of a line.
TEST(Copy, AroundTheCacheMovesEveryByteAndNothingElse) {
  Lane lane(2);
  BoxRandom random(10);
  constexpr int64_t kRows = 3;
  constexpr int64_t kCols = (int64_t{1} << 19) + 4096 + 13;  // fp32: 2 MiB and some, over 4 in all
  const std::vector<float> values = RandomValues(kRows * (kCols + 5) + 64, random);
  for (const int64_t width : {kCols, kCols / 16}) {  // of runs; as many of them as it takes
    const int64_t rows = kRows * (kCols / width);
    for (const int64_t from : {0, 3}) {
      for (const int64_t to : {0, 1, 15}) {
        std::vector<float> out(values.size() + 32, -7.0F);
        const auto box = [&](const float* data, int64_t stride) {
          return StridedBox{reinterpret_cast<std::byte*>(const_cast<float*>(data)),
                            DType::kF32,
                            2,
                            {rows, width},
                            {stride, 1}};
        };
        ASSERT_TRUE(lane.device->ops()
                        .Copy(*lane.stream, box(out.data() + to, width),
                              box(values.data() + from, width + 1))
                        .ok());
        for (int64_t row = 0; row < rows; ++row) {
          ASSERT_TRUE(std::equal(out.begin() + to + row * width,
                                 out.begin() + to + (row + 1) * width,
                                 values.begin() + from + row * (width + 1)))
              << "row " << row << " of " << width;
        }
        EXPECT_TRUE(std::all_of(out.begin(), out.begin() + to, [](float x) { return x == -7; }));
        EXPECT_TRUE(std::all_of(out.begin() + to + rows * width, out.end(),
                                [](float x) { return x == -7; }));
      }
    }
  }
}

TEST(NormBlocks, CountsBlocksThatAreTouched) {
  EXPECT_EQ(NormBlocks(0, 0), 0);
  EXPECT_EQ(NormBlocks(5, 0), 0);
  EXPECT_EQ(NormBlocks(0, kNormBlock), 1);
  EXPECT_EQ(NormBlocks(0, kNormBlock + 1), 2);
  EXPECT_EQ(NormBlocks(kNormBlock - 1, 2), 2);
  EXPECT_EQ(NormBlocks(kNormBlock, 1), 1);
}

}  // namespace
}  // namespace dmuond::kernels
