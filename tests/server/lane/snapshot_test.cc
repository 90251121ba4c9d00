// A lane's state on its way into the host copy and back, beside training.
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "tests/server/lane/harness.h"
#include "tests/server/lane/values.h"

namespace dmuond::server::lane::testing {
namespace {

using scheduler::testing::AdamW;
using scheduler::testing::Muon;
using scheduler::testing::World;

struct Way {
  RunAs run_as;
  int64_t staging_bytes;  // 0: straight
};

class SnapshotCopyTest : public ::testing::TestWithParam<Way> {
 protected:
  // Several chunks of several batches, and tensors that a chunk ends in.
  SnapshotCopyTest() : world_(1, 1, 1) {
    world_.Replicate(Muon("a", {640, 512})).Replicate(Muon("b", {640, 512}));
    world_.Replicate(Muon("c", {96, 64})).Replicate(AdamW("d", {700, 1000}));
    world_.Replicate(AdamW("e", {7}));
    cluster_.emplace(world_, 1, 1,
                     Cluster::Options{.run_as = GetParam().run_as,
                                      .host_copies = true,
                                      .snapshot_staging_bytes = GetParam().staging_bytes});
    cluster_->FillWeights([](int32_t r, int32_t p, int64_t i) { return Value(r, p, i); });
    cluster_->Push();
  }
  void Step(int salt) {
    cluster_->FillGradients(
        [&](int32_t r, int32_t p, int64_t i) { return Value(r + salt, p + 1, i); });
    cluster_->Step();
  }
  void TakeSnapshot() {
    v1::LaneCommand command;
    command.mutable_snapshot()->set_attempt(cluster_->attempt());
    cluster_->copied.clear();
    cluster_->Send(0, command);
  }
  void WaitCopied() {
    cluster_->PumpUntil(
        [&] { return !cluster_->copied.empty() && cluster_->copied.back().complete(); });
  }
  // The units' state in the order of the host copy, from the memory that the lane works on.
  std::vector<float> State() {
    std::vector<float> all;
    for (const scheduler::UnitId id : cluster_->host_copy(0).units) {
      const std::vector<float> unit = cluster_->StateOf(id);
      all.insert(all.end(), unit.begin(), unit.end());
    }
    return all;
  }
  std::vector<float> HostCopy() {
    const auto* begin = reinterpret_cast<const float*>(cluster_->host_memory(0));
    return {begin, begin + (cluster_->host_copy(0).bytes() / sizeof(float))};
  }

  World world_;
  std::optional<Cluster> cluster_;
};

TEST_P(SnapshotCopyTest, HoldsTheStateOfItsStepWhateverTrainingDoesMeanwhile) {
  Step(1);
  const std::vector<float> after_first = State();
  TakeSnapshot();
  Step(2);
  WaitCopied();
  EXPECT_TRUE(HostCopy() == after_first);
  EXPECT_FALSE(State() == after_first) << "training went on";
  ASSERT_GE(cluster_->copied.size(), 3) << "batch by batch";
  const v1::LaneReport::Copied& first = cluster_->copied.front();
  ASSERT_EQ(first.updates_size(), cluster_->host_copy(0).units.size());
  for (const uint64_t updates : first.updates()) EXPECT_EQ(updates, 1);
  for (size_t i = 1; i < cluster_->copied.size(); ++i) {
    EXPECT_GT(cluster_->copied[i].batches(), cluster_->copied[i - 1].batches());
  }
  TakeSnapshot();
  WaitCopied();
  EXPECT_TRUE(HostCopy() == State());
}

TEST_P(SnapshotCopyTest, IsNotHeldUpByACheck) {
  Step(1);
  TakeSnapshot();
  cluster_->SendCheck();
  cluster_->PumpUntil([&] { return cluster_->checked.has_value(); });
  EXPECT_EQ(cluster_->checked->digests_size(), cluster_->plan().units.size());
  WaitCopied();
  // The device may still work on the last chunks, which only then are reported.
  if (GetParam().run_as == RunAs::kThread) {
    EXPECT_EQ(cluster_->copied_before_checked, cluster_->copied.size());
  }
}

TEST_P(SnapshotCopyTest, BecomesTheStateAgain) {
  Step(1);
  const std::vector<float> after_first = State();
  const std::vector<float> weights = cluster_->Weights("d");
  TakeSnapshot();
  WaitCopied();
  Step(2);
  v1::LaneCommand command;
  command.mutable_load_state()->set_step(1);
  for (const uint64_t updates : cluster_->copied.front().updates()) {
    command.mutable_load_state()->add_updates(updates);
  }
  cluster_->Send(0, command);
  cluster_->PumpUntil([&] { return cluster_->state_loaded.has_value(); });
  EXPECT_EQ(cluster_->state_loaded->error(), "");
  EXPECT_TRUE(State() == after_first);
  for (const scheduler::UnitId id : cluster_->host_copy(0).units) {
    EXPECT_EQ(cluster_->State(id.value()).updates, 1);
    EXPECT_EQ(cluster_->State(id.value()).step, scheduler::StepId(1));
  }
  cluster_->Republish(cluster_->attempt() + 1, {0});
  EXPECT_TRUE(cluster_->Weights("d") == weights);
}

TEST_P(SnapshotCopyTest, RefusesNumbersOfUpdatesOfOtherUnits) {
  Step(1);
  v1::LaneCommand command;
  command.mutable_load_state()->set_step(1);
  cluster_->Send(0, command);
  cluster_->PumpUntil([&] { return cluster_->state_loaded.has_value(); });
  EXPECT_NE(cluster_->state_loaded->error(), "");
}

INSTANTIATE_TEST_SUITE_P(Ways, SnapshotCopyTest,
                         ::testing::Values(Way{RunAs::kThread, 0}, Way{RunAs::kLateThread, 0},
                                           Way{RunAs::kThread, 1},
                                           Way{RunAs::kLateThread, int64_t{1} << 23}));

}  // namespace
}  // namespace dmuond::server::lane::testing
