// A world of trainers whose gradients are known, so that any run can be compared bit by bit with an
// undisturbed one: the weights after a step depend on the step alone, on no number of ranks (a
// power of two), daemons or lanes.
#ifndef DMUOND_TESTS_SERVER_SYSTEM_SNAPSHOT_WORLD_H_
#define DMUOND_TESTS_SERVER_SYSTEM_SNAPSHOT_WORLD_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dmuond/client/session.h"
#include "gtest/gtest.h"
#include "tests/client/trainers.h"

namespace dmuond::testing {

// A directory that goes with the object.
class ScratchDirectory {
 public:
  explicit ScratchDirectory(
      const std::filesystem::path& parent = std::filesystem::temp_directory_path()) {
    path_ = parent / "dmuond-snapshots-XXXXXX";
    EXPECT_NE(::mkdtemp(path_.data()), nullptr);
  }
  ~ScratchDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Weights of all parameters, one after another.
using Values = std::vector<float>;

class SnapshotWorld {
 public:
  struct Options {
    int32_t ranks = 2;
    std::string job = "run7";
    client::Resume resume = client::Resume::kNever;
    client::Extents matrix = {24, 16};  // of one parameter: to make it another job's
    std::chrono::milliseconds reconnect_timeout{1};
  };
  // By rank: rank r speaks to daemon r mod their number.
  SnapshotWorld(std::vector<std::string> addresses, Options options)
      : addresses_(std::move(addresses)), options_(std::move(options)), sessions_(options_.ranks) {}

  static std::string StateOf(int32_t rank, int64_t step) {
    return step == 0 ? "" : absl::StrCat("rank ", rank, " after step ", step);
  }

  // Opens, registers and attaches every rank, and pushes where the job has no state. The first
  // rank's error, if there is one.
  absl::Status Start() {
    std::vector<absl::Status> statuses(options_.ranks);
    OnEveryRank(options_.ranks, [&](int32_t rank) { statuses[rank] = StartRank(rank); });
    for (const absl::Status& status : statuses) {
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // One step on every rank. Every outcome must be the same.
  absl::StatusOr<client::Outcome> Step() {
    std::vector<absl::StatusOr<client::Outcome>> outcomes(options_.ranks);
    OnEveryRank(options_.ranks, [&](int32_t rank) {
      client::Session& session = *sessions_[rank];
      const int64_t step = session.last_committed_step() + 1;
      for (size_t p = 0; p < kParameters; ++p) {
        std::span<float> gradient = session.Gradient<float>(static_cast<int32_t>(p));
        for (size_t i = 0; i < gradient.size(); ++i) {
          gradient[i] = ValueAt(step, p, First(rank, p) + i);
        }
      }
      outcomes[rank] = session.Step({.groups = {{.learning_rate = 0.02, .weight_decay = 0.01}}},
                                    {.trainer_state = StateOf(rank, step)});
    });
    for (const auto& outcome : outcomes) {
      if (!outcome.ok()) return outcome.status();
    }
    return outcomes[0];
  }
  // Up to and with this step; false after a failure, which is the test's.
  bool StepUntil(int64_t last) {
    while (sessions_[0]->last_committed_step() < last) {
      const auto outcome = Step();
      EXPECT_TRUE(outcome.ok()) << outcome.status();
      if (!outcome.ok()) return false;
      EXPECT_EQ(outcome->kind, client::Outcome::Kind::kCommitted);
      if (outcome->kind != client::Outcome::Kind::kCommitted) return false;
    }
    return true;
  }

  // Put together from all ranks; replicas must agree.
  Values Weights() {
    Values all;
    for (size_t p = 0; p < kParameters; ++p) {
      for (int32_t rank = 0; rank < options_.ranks; ++rank) {
        const std::span<float> weight = sessions_[rank]->Weight<float>(static_cast<int32_t>(p));
        if (rank == 0 || p == kSharded) {
          all.insert(all.end(), weight.begin(), weight.end());
        } else {
          EXPECT_TRUE(std::equal(weight.begin(), weight.end(), all.end() - weight.size()))
              << "replicas of parameter " << p << " differ at rank " << rank;
        }
      }
    }
    return all;
  }
  // What a run of one rank on one lane without any incident has after each step.
  static std::vector<Values> Undisturbed(const std::string& address, int64_t steps) {
    SnapshotWorld world({address}, {.ranks = 1, .job = "undisturbed"});
    std::vector<Values> weights;
    const absl::Status started = world.Start();
    EXPECT_TRUE(started.ok()) << started;
    if (!started.ok()) return {};
    weights.push_back(world.Weights());
    for (int64_t step = 1; step <= steps; ++step) {
      if (!world.StepUntil(step)) return {};
      weights.push_back(world.Weights());
    }
    world.Close();
    return weights;
  }

  // The rank's trainer dies, and another one comes.
  absl::Status Replace(int32_t rank) {
    sessions_[rank].reset();
    return StartRank(rank);
  }
  // The first half of a rank's start: its session has a layout and no memory.
  absl::Status Register(int32_t rank) {
    auto session = client::Session::Open({.address = addresses_[rank % addresses_.size()],
                                          .job = options_.job,
                                          .rank = rank,
                                          .world_size = options_.ranks,
                                          .resume = options_.resume,
                                          .reconnect_timeout = options_.reconnect_timeout});
    if (!session.ok()) return session.status();
    sessions_[rank] = *std::move(session);
    auto registered = sessions_[rank]->Register(LayoutOf(rank));
    if (registered.ok() && rank == 0) plan_digest_ = registered->plan_digest;
    return registered.status();
  }
  // The rank's trainer dies.
  void Drop(int32_t rank) { sessions_[rank].reset(); }
  void Close() {
    OnEveryRank(options_.ranks, [&](int32_t rank) {
      const absl::Status closed = sessions_[rank]->Close();
      EXPECT_TRUE(closed.ok()) << closed;
    });
  }
  client::Session& operator[](int32_t rank) { return *sessions_[rank]; }
  [[nodiscard]] int32_t ranks() const { return options_.ranks; }
  [[nodiscard]] uint64_t plan_digest() const { return plan_digest_; }

 private:
  static constexpr size_t kParameters = 5;
  static constexpr size_t kSharded = 4;
  static constexpr int64_t kShardedRows = 16;
  static constexpr int64_t kShardedCols = 6;

  [[nodiscard]] size_t First(int32_t rank, size_t parameter) const {
    if (parameter != kSharded) return 0;
    return static_cast<size_t>(rank * (kShardedRows / options_.ranks) * kShardedCols);
  }
  // Small numbers that are never quite the same.
  static float ValueAt(int64_t step, size_t parameter, size_t element) {
    const uint64_t mixed =
        (static_cast<uint64_t>(step) * 7919 + parameter * 104729 + element) * 0x9E3779B97F4A7C15ULL;
    return (static_cast<float>(mixed >> 40) / static_cast<float>(1 << 24)) - 0.5F;
  }

  [[nodiscard]] client::Layout LayoutOf(int32_t rank) const {
    client::LayoutBuilder builder(options_.ranks);
    builder.AddGroup({.preset = "torch"});
    builder.Add({.name = "wide", .shape = options_.matrix});
    builder.Add({.name = "experts", .shape = {3, 12, 8}});
    builder.Add({.name = "embedding", .shape = {50, 8}, .route = client::Route::kAdamW});
    builder.Add({.name = "bias", .shape = {24}, .route = client::Route::kAdamW});
    const int64_t rows = kShardedRows / options_.ranks;
    builder.Add({.name = "sharded",
                 .shape = {kShardedRows, kShardedCols},
                 .route = client::Route::kAdamW,
                 .box = client::Box{{rank * rows, 0}, {(rank + 1) * rows, kShardedCols}}});
    builder.set_bucket_bytes(1024);
    auto layout = builder.Build();
    EXPECT_TRUE(layout.ok()) << layout.status();
    return *layout;
  }

  absl::Status StartRank(int32_t rank) {
    absl::Status status = Register(rank);
    if (!status.ok()) return status;
    client::Session& session = *sessions_[rank];
    status = session.Attach();
    if (!status.ok() || session.has_state()) return status;
    for (size_t p = 0; p < kParameters; ++p) {
      std::span<float> weight = session.Weight<float>(static_cast<int32_t>(p));
      for (size_t i = 0; i < weight.size(); ++i) weight[i] = ValueAt(0, p, First(rank, p) + i);
    }
    return session.Push();
  }

  const std::vector<std::string> addresses_;
  const Options options_;
  std::vector<std::unique_ptr<client::Session>> sessions_;
  uint64_t plan_digest_ = 0;
};

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_SERVER_SYSTEM_SNAPSHOT_WORLD_H_
