// Copy, Fill and Sum on the GPU: the bytes of the CPU device, gaps included.
#include <cmath>
#include <limits>

#include "tests/kernels/cuda/gpu.h"
#include "tests/kernels/random_box.h"

namespace dmuond::kernels::cuda {
namespace {

constexpr int kRounds = 200;

class BoxOps : public GpuTest {
 protected:
  Shape AnyShape() {
    Shape shape;
    const auto dims = static_cast<int>(random_() % 5);
    for (int d = 0; d < dims; ++d) {
      shape.push_back(static_cast<int64_t>(random_() % 11) + (d == 3 ? 0 : 1));
    }
    return shape;
  }
  StridedBox BoxOf(const OwnedBox& box, const Twin& twin) const {
    StridedBox moved = box.box();
    moved.data = twin.At(box.box().data);
    return moved;
  }
  BoxRandom random_{31};
};

TEST_F(BoxOps, CopiesOfAnyStridesAndTypesMatch) {
  for (int round = 0; round < kRounds; ++round) {
    const Shape shape = round % 20 == 0 ? Shape{3, 257, 401} : AnyShape();
    OwnedBox src(shape, RandomDType(random_), random_);
    const DType to = round % 2 == 0 ? src.box().dtype : RandomDType(random_);
    OwnedBox dst(shape, to, random_);
    src.Write(RandomValues(Count(shape), random_));
    const Twin gpu_src = Put(src.memory());
    const Twin gpu_dst = Put(dst.memory());
    ASSERT_TRUE(cpu_->ops().Copy(*cpu_stream_, dst.box(), src.box()).ok());
    const absl::Status status =
        gpu_->ops().Copy(*gpu_stream_, BoxOf(dst, gpu_dst), BoxOf(src, gpu_src));
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(gpu_dst.Read(), dst.memory()) << round;
  }
}

TEST_F(BoxOps, FillsMatch) {
  const float values[] = {0.0F, 0.3F, -1e30F, std::numeric_limits<float>::infinity()};
  for (int round = 0; round < kRounds; ++round) {
    const Shape shape = AnyShape();
    OwnedBox dst(shape, RandomDType(random_), random_);
    const Twin twin = Put(dst.memory());
    ASSERT_TRUE(cpu_->ops().Fill(*cpu_stream_, dst.box(), values[round % 4]).ok());
    const absl::Status status = gpu_->ops().Fill(*gpu_stream_, BoxOf(dst, twin), values[round % 4]);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(twin.Read(), dst.memory()) << round;
  }
  std::vector<uint16_t> weights(100);
  const Twin twin = Put(weights);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const StridedBox box{twin.data(), dtype, 1, {100}, {1}};
    ASSERT_TRUE(gpu_->ops().Fill(*gpu_stream_, box, NAN).ok());
    for (const uint16_t bits : twin.ReadAs<uint16_t>()) {
      float value = 0;
      cpu::Widen(dtype, reinterpret_cast<const std::byte*>(&bits), &value, 1);
      ASSERT_TRUE(std::isnan(value));
    }
  }
}

// Sources of any types, absent ones among them, and partial sums of aligned subtrees.
TEST_F(BoxOps, SumsAreTheSameTree) {
  for (int round = 0; round < kRounds; ++round) {
    const bool plain = round % 2 == 0;  // consecutive elements of one type: the vector kernel
    const Shape shape = plain ? Shape{static_cast<int64_t>(random_() % 70000) + 1} : AnyShape();
    const DType one = RandomDType(random_);
    const auto count = 1 + static_cast<int>(random_() % (round % 10 == 1 ? 60 : 9));
    std::vector<OwnedBox> sources;
    std::vector<uint8_t> levels;
    sources.reserve(count);
    int64_t leaf = 0;
    for (int i = 0; i < count; ++i) {
      sources.emplace_back(shape, plain ? one : RandomDType(random_), random_);
      sources.back().Write(RandomValues(Count(shape), random_));
      uint8_t level = 0;
      while (round % 4 >= 2 && random_() % 2 == 0 && leaf % (int64_t{2} << level) == 0 &&
             level < 5) {
        ++level;
      }
      levels.push_back(level);
      leaf += int64_t{1} << level;
    }
    const auto dst = std::make_unique<OwnedBox>(shape, DType::kF32, random_);
    const Twin gpu_dst = Put(dst->memory());
    std::vector<Twin> twins;
    std::vector<StridedBox> cpu_boxes;
    std::vector<StridedBox> gpu_boxes;
    for (const OwnedBox& source : sources) {
      twins.push_back(Put(source.memory()));
      const bool present = random_() % 5 != 0;
      cpu_boxes.push_back(present ? source.box() : source.Absent());
      gpu_boxes.push_back(present ? BoxOf(source, twins.back()) : source.Absent());
    }
    const float factor = round % 3 == 0 ? 1.0F : 0.37F;
    const std::span<const uint8_t> tree =
        round % 4 >= 2 ? std::span<const uint8_t>(levels) : std::span<const uint8_t>();
    const SumTask cpu_task{dst->box(), cpu_boxes, tree, factor};
    const SumTask gpu_task{BoxOf(*dst, gpu_dst), gpu_boxes, tree, factor};
    ASSERT_TRUE(cpu_->ops().Sum(*cpu_stream_, {&cpu_task, 1}).ok());
    const absl::Status status = gpu_->ops().Sum(*gpu_stream_, {&gpu_task, 1});
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(gpu_dst.Read(), dst->memory()) << round << ": " << count << " sources";
  }
}

// Whole runs, 16 bytes at a time, with the squares that SumsOfSquares() gives for the result.
TEST_F(BoxOps, SumsOfRunsAreTheSameTree) {
  const auto sums = *gpu_->AllocateHost(16 * sizeof(double));
  auto* const squares = reinterpret_cast<double*>(sums->data());
  for (int round = 0; round < kRounds / 4; ++round) {
    const auto n = static_cast<int64_t>(random_() % (3 * kNormBlock)) + 1;
    const auto count = 1 + static_cast<int>(random_() % 11);  // more than eight go another way
    const DType one = RandomDType(random_);
    std::vector<std::vector<std::byte>> memory;
    std::vector<Twin> twins;
    std::vector<uint8_t> levels;
    std::vector<StridedBox> cpu_boxes;
    std::vector<StridedBox> gpu_boxes;
    int64_t leaf = 0;
    for (int i = 0; i < count; ++i) {
      const DType dtype = round % 2 == 0 ? one : RandomDType(random_);
      const std::vector<float> values = RandomValues(n, random_);
      memory.emplace_back(n * SizeOf(dtype));
      cpu::Narrow(dtype, values.data(), memory.back().data(), n);
      twins.push_back(Put(memory.back()));
      uint8_t level = 0;
      while (round % 3 != 0 && random_() % 2 == 0 && leaf % (int64_t{2} << level) == 0 &&
             level < 6) {
        ++level;
      }
      levels.push_back(level);
      leaf += int64_t{1} << level;
      const bool present = random_() % 5 != 0;
      cpu_boxes.push_back({present ? memory.back().data() : nullptr, dtype, 1, {n}, {1}});
      gpu_boxes.push_back({present ? twins.back().data() : nullptr, dtype, 1, {n}, {1}});
    }
    std::vector<float> expected(n, NAN);
    const Twin result = Put(expected);
    const float factor = round % 5 == 0 ? 1.0F : 0.37F;
    const bool with_squares = round % 7 < 4;
    SumTask cpu_task{{reinterpret_cast<std::byte*>(expected.data()), DType::kF32, 1, {n}, {1}},
                     cpu_boxes,
                     levels,
                     factor};
    SumTask gpu_task{{result.data(), DType::kF32, 1, {n}, {1}}, gpu_boxes, levels, factor};
    if (with_squares) gpu_task.squares = squares;
    ASSERT_TRUE(cpu_->ops().Sum(*cpu_stream_, {&cpu_task, 1}).ok());
    ASSERT_TRUE(gpu_->ops().Sum(*gpu_stream_, {&gpu_task, 1}).ok());
    const std::vector<float> got = result.ReadAs<float>();
    ASSERT_EQ(std::memcmp(got.data(), expected.data(), n * sizeof(float)), 0)
        << round << ": " << count << " sources";
    if (!with_squares) continue;
    const NormTask norm{result.as<float>(), n, 0, squares + 8};
    ASSERT_TRUE(gpu_->ops().SumsOfSquares(*gpu_stream_, {&norm, 1}).ok());
    Synchronize();
    for (int64_t i = 0; i < NormBlocks(0, n); ++i) {
      ASSERT_EQ(squares[i], squares[8 + i]) << round << ", block " << i;
    }
  }
}

TEST_F(BoxOps, SumsOfMoreSourcesThanParametersHoldAreTheSameTree) {
  for (const int count : {257, 1000}) {
    const int64_t n = 37;
    std::vector<float> values = RandomValues(count * n, random_);
    std::vector<float> expected(n, NAN);
    const Twin twin = Put(values);
    const Twin result = Put(expected);
    std::vector<StridedBox> cpu_boxes;
    std::vector<StridedBox> gpu_boxes;
    for (int i = 0; i < count; ++i) {
      const bool present = i % 7 != 3;
      const auto box = [&](float* data) {
        return StridedBox{present ? reinterpret_cast<std::byte*>(data + i * n) : nullptr,
                          DType::kF32,
                          1,
                          {n},
                          {1}};
      };
      cpu_boxes.push_back(box(values.data()));
      gpu_boxes.push_back(box(twin.as<float>()));
    }
    const auto dst = [&](void* data) {
      return StridedBox{static_cast<std::byte*>(data), DType::kF32, 1, {n}, {1}};
    };
    const SumTask cpu_task{dst(expected.data()), cpu_boxes, {}, 0.25F};
    const SumTask gpu_task{dst(result.data()), gpu_boxes, {}, 0.25F};
    ASSERT_TRUE(cpu_->ops().Sum(*cpu_stream_, {&cpu_task, 1}).ok());
    const absl::Status status = gpu_->ops().Sum(*gpu_stream_, {&gpu_task, 1});
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(result.ReadAs<float>(), expected) << count;
  }
}

TEST_F(BoxOps, ManyTasksInOneCallMatch) {
  std::vector<std::vector<float>> leaves;
  std::vector<Twin> twins;
  std::vector<std::vector<float>> expected;
  std::vector<Twin> results;
  std::vector<std::vector<StridedBox>> cpu_boxes;
  std::vector<std::vector<StridedBox>> gpu_boxes;
  constexpr int kTasks = 75;
  for (int i = 0; i < kTasks * 2; ++i) {
    leaves.push_back(RandomValues(1 + i * 37, random_));
    twins.push_back(Put(leaves.back()));
  }
  const auto box = [](void* data, int64_t n) {
    return StridedBox{static_cast<std::byte*>(data), DType::kF32, 1, {n}, {1}};
  };
  for (int i = 0; i < kTasks; ++i) {
    const auto n = static_cast<int64_t>(leaves[i].size());
    expected.emplace_back(n, NAN);
    results.push_back(Put(expected.back()));
    cpu_boxes.push_back({box(leaves[i].data(), n), box(leaves[i + 1].data(), n)});
    gpu_boxes.push_back({box(twins[i].data(), n), box(twins[i + 1].data(), n)});
  }
  std::vector<SumTask> cpu_tasks;
  std::vector<SumTask> gpu_tasks;
  for (int i = 0; i < kTasks; ++i) {
    const auto n = static_cast<int64_t>(leaves[i].size());
    cpu_tasks.push_back({box(expected[i].data(), n), cpu_boxes[i]});
    gpu_tasks.push_back({box(results[i].data(), n), gpu_boxes[i]});
  }
  ASSERT_TRUE(cpu_->ops().Sum(*cpu_stream_, cpu_tasks).ok());
  ASSERT_TRUE(gpu_->ops().Sum(*gpu_stream_, gpu_tasks).ok());
  for (int i = 0; i < kTasks; ++i) ASSERT_EQ(results[i].ReadAs<float>(), expected[i]) << i;
}

TEST_F(BoxOps, WrongTasksAreRefused) {
  OwnedBox dst({4, 5}, DType::kF32, random_);
  OwnedBox other({4, 6}, DType::kF32, random_);
  const auto bad = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(gpu_->ops().Copy(*gpu_stream_, dst.box(), other.box()).code(), bad);
  EXPECT_EQ(gpu_->ops().Fill(*gpu_stream_, dst.Absent(), 0).code(), bad);
  const std::vector<StridedBox> wrong = {dst.box(), other.box()};
  const SumTask task{dst.box(), wrong};
  EXPECT_EQ(gpu_->ops().Sum(*gpu_stream_, {&task, 1}).code(), bad);
}

}  // namespace
}  // namespace dmuond::kernels::cuda
