// The tuner: what it refuses, and what it finds on a GPU.
#include "kernels/cuda/cublaslt.h"
#include "kernels/cuda/library_product.h"
#include "kernels/cuda/update_tuner.h"
#include "kernels/presets.h"
#include "tests/kernels/cuda/gpu.h"

namespace dmuond::kernels::cuda {
namespace {

TEST(TunerRefuses, WrongNumbersAndBitsThatDependOnTheBatch) {
  EXPECT_EQ(RefusalOf(1e-3, 0, 0, false), "");
  EXPECT_NE(RefusalOf(0.05, 0, 0, false), "");
  EXPECT_NE(RefusalOf(NAN, 0, 0, true), "");
  EXPECT_NE(RefusalOf(1e-3, 1, 0, true), "");
  EXPECT_NE(RefusalOf(1e-3, 0, 1, false), "");
  EXPECT_EQ(RefusalOf(1e-3, 0, 1, true), "") << "--numerics=fastest";
}

TEST(Library, IsThereOrSaysWhatToDo) {
  const absl::Status absent = CublasLt::Load("libcublasLt.so.none").status();
  EXPECT_EQ(absent.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(std::string(absent.message()).find("libcublasLt.so.none"), std::string::npos) << absent;
  EXPECT_NE(std::string(absent.message()).find("LD_LIBRARY_PATH"), std::string::npos) << absent;
  const absl::Status status = CheckLibrary();
  EXPECT_EQ(LibraryVersion().empty(), !status.ok());
  if (!status.ok()) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_NE(std::string(status.message()).find("libcublasLt.so."), std::string::npos) << status;
  }
}

class Tuner : public GpuTest {};

TEST_F(Tuner, EveryEngineAndFormIsCheckedAndOneWins) {
  TuningOptions options;
  options.config = *FindPreset("dmuon");
  options.seconds = 1;
  options.fastest = true;
  const TuningTask tasks[] = {{256, 640, {1, 2, 4}}, {512, 512, {1, 3}}};
  const auto tuned = TuneUpdates(tasks, options);
  ASSERT_TRUE(tuned.ok()) << tuned.status();
  ASSERT_EQ(tuned->size(), 2U);
  const size_t engines = CheckLibrary().ok() ? 2 : 1;
  for (const TunedShape& shape : *tuned) {
    ASSERT_EQ(shape.candidates.size(), 2 * engines);
    for (const TunedCandidate& candidate : shape.candidates) {
      EXPECT_EQ(candidate.refused, "");
      EXPECT_GT(candidate.error, 0);
      EXPECT_LT(candidate.error, 0.04);
      EXPECT_GT(candidate.microseconds, 0);
    }
    ASSERT_LT(shape.winner, shape.candidates.size());
    const TunedCandidate& winner = shape.candidates[shape.winner];
    for (const TunedCandidate& candidate : shape.candidates) {
      EXPECT_EQ(candidate.batch, winner.batch);
      EXPECT_LT(winner.microseconds, 1.02 * candidate.microseconds);
    }
    std::vector<int32_t> batches;
    for (const auto& [batch, microseconds] : shape.times) {
      batches.push_back(batch);
      EXPECT_GT(microseconds, 0) << batch;
    }
    EXPECT_EQ(batches, shape.rows == 256 ? tasks[0].batches : tasks[1].batches);
  }
}

TEST_F(Tuner, TimesDecideNothingUnlessTheyMay) {
  TuningOptions options;
  options.config = *FindPreset("dmuon");
  options.seconds = 0.5;
  const TuningTask task{256, 640, {1, 2}};
  const auto tuned = TuneUpdates({&task, 1}, options);
  ASSERT_TRUE(tuned.ok()) << tuned.status();
  EXPECT_EQ(tuned->front().candidates.size(), 1U);
  EXPECT_EQ(tuned->front().times.size(), 2U);
}

TEST_F(Tuner, NoTasksHaveNoResults) {
  TuningOptions options;
  options.config = *FindPreset("dmuon");
  const auto tuned = TuneUpdates({}, options);
  ASSERT_TRUE(tuned.ok()) << tuned.status();
  EXPECT_TRUE(tuned->empty());
}

TEST_F(Tuner, BatchesThatDoNotFitAreLeftOut) {
  TuningOptions options;
  options.config = *FindPreset("dmuon");
  options.seconds = 0.5;
  options.memory_bytes_max = size_t{96} << 20;
  const TuningTask task{512, 512, {1, 2, 64}};
  const auto tuned = TuneUpdates({&task, 1}, options);
  ASSERT_TRUE(tuned.ok()) << tuned.status();
  ASSERT_EQ(tuned->front().times.size(), 2U);
  EXPECT_EQ(tuned->front().times.back().first, 2);
}

TEST_F(Tuner, AMatrixThatDoesNotFitIsNamed) {
  TuningOptions options;
  options.config = *FindPreset("dmuon");
  options.memory_bytes_max = 1 << 20;
  const TuningTask task{4096, 4096, {1}};
  const absl::Status status = TuneUpdates({&task, 1}, options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(std::string(status.message()).find("4096 x 4096"), std::string::npos);
}

}  // namespace
}  // namespace dmuond::kernels::cuda
