// In the steady state of a step nothing allocates: the second call of each operation on the same
// shapes runs without operator new.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "kernels/presets.h"
#include "tests/kernels/cpu_muon_helpers.h"
#include "tests/kernels/random_box.h"

namespace {
std::atomic<int64_t> allocations{0};
}  // namespace

void* operator new(std::size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace dmuond::kernels::cpu {
namespace {

template <typename Work>
void ExpectNoAllocationTheSecondTime(Work&& work) {
  work();
  const int64_t before = allocations;
  work();
  EXPECT_EQ(allocations - before, 0);
}

TEST(NoAllocation, InMemoryOperations) {
  TestLane lane(3);
  BoxRandom random(1);
  const Shape shape = {8, 300, 200};
  std::vector<OwnedBox> boxes;
  std::vector<StridedBox> sources;
  for (int i = 0; i < 17; ++i) boxes.emplace_back(shape, RandomDType(random), random);
  for (int i = 1; i < 17; ++i) sources.push_back(boxes[i].box());
  OwnedBox dst(shape, DType::kF32, random);
  const std::vector<SumTask> sums = {{dst.box(), sources, {}, 0.5F}};
  std::vector<float> values(200000);
  std::vector<double> totals(16);
  const std::vector<NormTask> norms = {{values.data(), 200000, 5, totals.data()}};
  EXPECT_GT(allocations, 0);  // the counter counts
  ExpectNoAllocationTheSecondTime([&] {
    EXPECT_TRUE(lane.ops().Copy(lane.stream(), dst.box(), boxes[0].box()).ok());
    EXPECT_TRUE(lane.ops().Fill(lane.stream(), dst.box(), 1).ok());
    EXPECT_TRUE(lane.ops().Sum(lane.stream(), sums).ok());
    EXPECT_TRUE(lane.ops().SumsOfSquares(lane.stream(), norms).ok());
  });
}

TEST(NoAllocation, InUpdates) {
  TestLane lane(2);
  constexpr int64_t kElements = 96 * 300;
  BoxRandom random(2);
  std::vector<std::vector<float>> memory(8, RandomValues(kElements, random));
  UpdateScalars scalars;
  scalars.learning_rate = 1e-3;
  const std::vector<AdamWPiece> pieces = {{kElements, DType::kBF16, memory[0].data(),
                                           memory[1].data(), memory[2].data(), memory[1].data(),
                                           memory[3].data(), memory[4].data(), memory[5].data(),
                                           memory[6].data(), &scalars}};
  const MuonMatrix matrix = {.gradient = memory[0].data(),
                             .momentum_in = memory[1].data(),
                             .master_in = memory[3].data(),
                             .scalars = &scalars};
  // Three updates of one matrix: by two threads at once, then by panels. All write the same bits to
  // different memory.
  std::vector<std::vector<float>> outputs(9, std::vector<float>(kElements));
  std::vector<MuonMatrix> apart(3, matrix);
  for (int i = 0; i < 3; ++i) {
    apart[i].momentum_out = outputs[3 * i].data();
    apart[i].master_out = outputs[3 * i + 1].data();
    apart[i].weight_out = outputs[3 * i + 2].data();
  }
  for (const char* preset : {"dmuon", "torch"}) {
    const MuonConfig config = *FindPreset(preset);
    auto device = *CpuDevice::Create(1);
    auto workspace = *device->AllocateScratch(lane.ops().MuonWorkspaceBytes(96, 300, 3, config));
    ExpectNoAllocationTheSecondTime([&] {
      EXPECT_TRUE(lane.ops().UpdateAdamW(lane.stream(), pieces).ok());
      EXPECT_GT(lane.ops().MuonWorkspaceBytes(96, 300, 3, config), 0);
      EXPECT_TRUE(lane.ops()
                      .UpdateMuon(lane.stream(),
                                  {.rows = 96,
                                   .cols = 300,
                                   .weight_dtype = DType::kF32,
                                   .config = &config,
                                   .matrices = apart},
                                  workspace->data())
                      .ok());
    });
  }
}

}  // namespace
}  // namespace dmuond::kernels::cpu
