// Trainers of the C++ client for jobs of a test: on streams of their own on the fake driver's GPUs,
// or on the processor, with the same gradients. Failures are the test's.
#ifndef DMUOND_TESTS_FAKE_CUDA_GPU_TRAINERS_H_
#define DMUOND_TESTS_FAKE_CUDA_GPU_TRAINERS_H_

#include <cuda.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dmuond/client/device_arenas.h"
#include "dmuond/client/session.h"
#include "tests/client/trainers.h"

namespace dmuond::testing {

using client::DeviceArenas;
using client::Outcome;
using client::Session;

inline constexpr int64_t kSteps = 6;

#define MUST(call) ASSERT_EQ(call, CUDA_SUCCESS) << #call

inline client::Layout Parameters(int32_t world) {
  client::LayoutBuilder builder(world);
  builder.AddGroup({.preset = "dmuon"});
  for (int i = 0; i < 6; ++i) {
    builder.Add({.name = absl::StrCat("matrix", i), .shape = {32 + 16 * (i % 3), 48}});
  }
  builder.Add({.name = "vector", .shape = {1000}, .route = client::Route::kAdamW});
  builder.set_bucket_bytes(8192);
  return *builder.Build();
}

// Numbers that differ by rank, step, parameter and element.
inline std::vector<float> Numbers(size_t count, int64_t seed) {
  std::vector<float> numbers(count);
  for (size_t i = 0; i < count; ++i) {
    numbers[i] = static_cast<float>(static_cast<int64_t>((i * 37 + seed * 101) % 257) - 128) / 256;
  }
  return numbers;
}

inline const client::StepScalars kScalars = {
    .groups = {{.learning_rate = 0.02, .weight_decay = 0.1}}};

using Weights = std::vector<std::vector<float>>;  // by parameter

// A trainer, with its arenas in host memory.
class Trainer {
 public:
  Trainer(const std::string& address, int32_t rank, int32_t world, client::Options options = {}) {
    options.address = address;
    options.rank = rank;
    options.world_size = world;
    auto session = Session::Open(options);
    EXPECT_TRUE(session.ok()) << session.status();
    if (!session.ok()) return;
    session_ = *std::move(session);
  }
  virtual ~Trainer() = default;
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  void Begin() {
    ASSERT_NE(session_, nullptr);
    client::Layout layout = Parameters(session_->world_size());
    Place(layout);
    parameters_ = static_cast<int32_t>(layout.parameters.size());
    const auto registered = session_->Register(layout);
    ASSERT_TRUE(registered.ok()) << registered.status();
    buckets_ = static_cast<int32_t>(registered->buckets);
    ASSERT_GT(buckets_, 2);
    absl::Status status = session_->Attach();
    ASSERT_TRUE(status.ok()) << status;
    if (session_->has_state()) return;
    for (int32_t p = 0; p < parameters_; ++p) {
      Upload(session_->WeightBytes(p), Numbers(session_->Size(p), p));
    }
    Synchronize();
    status = session_->Push();
    ASSERT_TRUE(status.ok()) << status;
  }
  void Step() {
    const int64_t step = session_->last_committed_step() + 1;
    UploadGradients();
    Expect(Finish(kScalars), step);
  }
  // The host waits for the device, before and afterwards.
  void StepAndWait() {
    const int64_t step = session_->last_committed_step() + 1;
    UploadGradients();
    Synchronize();
    Expect(session_->Step(kScalars), step);
  }
  Weights Read() {
    Weights weights;
    for (int32_t p = 0; p < parameters_; ++p) {
      weights.push_back(Download(session_->WeightBytes(p), session_->Size(p)));
    }
    Synchronize();
    return weights;
  }
  [[nodiscard]] Session& session() { return *session_; }

 protected:
  // Gives the arenas memory of the trainer's own, where it has some.
  virtual void Place(client::Layout& /*layout*/) {}
  void UploadGradients() {
    for (int32_t p = parameters_ - 1; p >= 0; --p) {
      const int64_t seed =
          (((session_->rank() * 1000) + session_->last_committed_step()) * 100) + p;
      Upload(session_->GradientBytes(p), Numbers(session_->Size(p), seed));
    }
  }
  static void Expect(const absl::StatusOr<Outcome>& outcome, int64_t step) {
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    ASSERT_EQ(outcome->kind, Outcome::Kind::kCommitted) << outcome->detail;
    ASSERT_EQ(outcome->step, step);
  }
  virtual void Upload(std::byte* to, std::vector<float> from) {
    std::memcpy(to, from.data(), from.size() * sizeof(float));
  }
  virtual std::vector<float> Download(const std::byte* from, size_t count) {
    std::vector<float> values(count);
    std::memcpy(values.data(), from, count * sizeof(float));
    return values;
  }
  virtual absl::StatusOr<Outcome> Finish(const client::StepScalars& scalars) {
    return session_->Step(scalars);
  }
  virtual void Synchronize() {}

  std::unique_ptr<Session> session_;
  int32_t parameters_ = 0;
  int32_t buckets_ = 0;
};

// One on a GPU, whose host never waits for the device but to look at weights.
class GpuTrainer final : public Trainer {
 public:
  GpuTrainer(const std::string& address, int32_t rank, int32_t world, int device,
             client::Resume resume = client::Resume::kNever)
      : Trainer(address, rank, world, {.resume = resume, .arenas = *DeviceArenas::Open(device)}) {
    EnterAndMakeStream(device);
  }
  ~GpuTrainer() override {
    session_.reset();
    cuStreamDestroy(stream_);
    if (own_ != 0) cuMemFree(own_);
  }
  // Has all arenas in one allocation of its own. Before Begin().
  void HaveMemory() { has_memory_ = true; }
  [[nodiscard]] CUdeviceptr own() const { return own_; }
  // Ends the session without Close(), as a death does. The memory is still there.
  void Abandon() { session_.reset(); }
  [[nodiscard]] CUstream stream() const { return stream_; }

 protected:
  void Place(client::Layout& layout) override {
    if (!has_memory_) return;
    size_t bytes = 256;
    for (const client::ArenaSpec& arena : layout.arenas) bytes += arena.size_bytes;
    MUST(cuMemAlloc(&own_, bytes));
    auto* place = reinterpret_cast<std::byte*>(own_) + 256;
    for (client::ArenaSpec& arena : layout.arenas) {
      arena.memory = place;
      place += arena.size_bytes;
    }
  }
  void Upload(std::byte* to, std::vector<float> from) override {
    sent_.push_back(std::move(from));
    MUST(cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(to),
                       reinterpret_cast<CUdeviceptr>(sent_.back().data()),
                       sent_.back().size() * sizeof(float), stream_));
  }
  std::vector<float> Download(const std::byte* from, size_t count) override {
    std::vector<float> values(count);
    EXPECT_EQ(cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(values.data()),
                            reinterpret_cast<CUdeviceptr>(from), count * sizeof(float), stream_),
              CUDA_SUCCESS);
    return values;
  }
  absl::StatusOr<Outcome> Finish(const client::StepScalars& scalars) override {
    for (int32_t bucket = buckets_ - 1; bucket > 0; --bucket) {
      absl::Status marked = session_->MarkReady(bucket, stream_);
      if (!marked.ok()) return marked;
    }
    absl::StatusOr<Outcome> outcome;
    do {
      outcome = session_->Submit(scalars, {.stream = stream_});
    } while (outcome.ok() && outcome->kind == Outcome::Kind::kAborted && outcome->retry);
    if (!outcome.ok()) return outcome;
    absl::Status waits = session_->WaitPublished(stream_);
    if (!waits.ok()) return waits;
    return outcome;
  }
  void Synchronize() override {
    EXPECT_EQ(cuStreamSynchronize(stream_), CUDA_SUCCESS);
    sent_.clear();
  }

 private:
  void EnterAndMakeStream(int device) {
    CUcontext context = nullptr;
    MUST(cuDevicePrimaryCtxRetain(&context, device));
    MUST(cuCtxSetCurrent(context));
    MUST(cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING));
  }

  CUstream stream_ = nullptr;
  bool has_memory_ = false;
  CUdeviceptr own_ = 0;
  std::list<std::vector<float>> sent_;  // until they have been
};

using MakeTrainer = std::function<std::unique_ptr<Trainer>(int32_t rank)>;
// Runs a job of kSteps and returns what every rank has at its end; all have the same. `between`:
// called by rank 0 after each step.
inline Weights RunJob(int32_t world, const MakeTrainer& make,
                      const std::function<void(int64_t)>& between = {}) {
  std::vector<Weights> weights(world);
  OnEveryRank(world, [&](int32_t rank) {
    const std::unique_ptr<Trainer> trainer = make(rank);
    trainer->Begin();
    for (int64_t step = 1; step <= kSteps && !::testing::Test::HasFailure(); ++step) {
      trainer->Step();
      if (rank == 0 && between) between(step);
    }
    weights[rank] = trainer->Read();
    EXPECT_TRUE(trainer->session().Close().ok());
  });
  for (const Weights& others : weights) EXPECT_EQ(others, weights[0]);
  return weights[0];
}

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_FAKE_CUDA_GPU_TRAINERS_H_
