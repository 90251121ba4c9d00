// What comes of a job's snapshots when nodes give up, answer late, or answer never what they were
// asked.
#include "scheduler/job/snapshot_round.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "scheduler/convert/convert.h"
#include "scheduler/plan.h"
#include "tests/scheduler/job/registrations.h"

namespace dmuond::scheduler {
namespace {

using std::chrono::minutes;
using ::testing::ElementsAre;

constexpr char kHangs[] = "SNAPSHOT_DIR_HANGS";

// A job on two nodes, a snapshot every ten minutes, a step whenever a test says so.
class SnapshotRoundTest : public ::testing::Test {
 protected:
  SnapshotRoundTest()
      : wire_(Wire()),
        inputs_(*FromProto(wire_)),
        plan_(*MakePlan(inputs_)),
        snapshots_({&wire_, &inputs_, &plan_}, {.every_steps = 0, .every = minutes(10)},
                   std::nullopt, now_) {}

  static v1::PlanInputs Wire() {
    v1::PlanInputs wire;
    wire.set_job("job");
    wire.set_nodes(2);
    wire.set_lanes_per_node(1);
    *wire.add_registrations() = OfOneMatrix(0, 1);
    return wire;
  }

  // The next step commits so much later; the attempt whose state is to be saved, 0: none.
  uint64_t Commit(std::chrono::milliseconds later) {
    now_ += later;
    v1::Decision decision;
    decision.set_kind(v1::ATTEMPT_KIND_STEP);
    decision.set_verdict(v1::Decision::VERDICT_COMMIT);
    decision.set_step(++step_);
    decision.set_attempt(static_cast<uint64_t>(step_));
    const std::optional<v1::SaveState> save = snapshots_.OnDecision(now_, decision);
    return save.has_value() ? save->attempt() : 0;
  }
  static v1::SnapshotWritten Written(uint64_t attempt, int32_t node) {
    v1::SnapshotWritten written;
    written.set_attempt(attempt);
    written.set_node(node);
    written.add_files()->set_name(absl::StrCat("lane-", node, ".of-", attempt));
    return written;
  }
  static v1::SnapshotWritten GivenUp(uint64_t attempt, int32_t node) {
    v1::SnapshotWritten written;
    written.set_attempt(attempt);
    written.set_node(node);
    written.set_error("it hangs");
    written.set_reason(kHangs);
    return written;
  }
  static v1::ManifestWritten Manifest(uint64_t attempt) {
    v1::ManifestWritten written;
    written.set_attempt(attempt);
    return written;
  }
  static std::vector<std::string> Names(const v1::WriteManifest& write) {
    std::vector<std::string> names;
    for (const v1::SnapshotFile& file : write.manifest().files()) names.push_back(file.name());
    return names;
  }
  // Both nodes have answered, node 1 that it gave up; what is told of it.
  v1::SnapshotDone FailBecauseNodeOneHangs(uint64_t attempt) {
    EXPECT_FALSE(snapshots_.OnWritten(now_, Written(attempt, 0)).has_value());
    const std::optional<v1::WriteManifest> write = snapshots_.OnWritten(now_, GivenUp(attempt, 1));
    EXPECT_TRUE(write.has_value());
    EXPECT_THAT(Names(*write), ElementsAre()) << "what is left of it is removed";
    const auto finished = snapshots_.OnManifestWritten(now_, Manifest(attempt));
    EXPECT_TRUE(finished.has_value());
    return finished->done;
  }

  const v1::PlanInputs wire_;
  const PlanInputs inputs_;
  const Plan plan_;
  TimePoint now_;
  int64_t step_ = 0;
  SnapshotRound snapshots_;
};

TEST_F(SnapshotRoundTest, ANodeThatGivesUpFailsTheSnapshotAndItsReasonIsTold) {
  const uint64_t attempt = Commit(minutes(10));
  ASSERT_EQ(attempt, 1U);
  const v1::SnapshotDone done = FailBecauseNodeOneHangs(attempt);
  EXPECT_EQ(done.error(), "node 1: it hangs");
  EXPECT_EQ(done.reason(), kHangs);
  EXPECT_EQ(done.failed(), 1);
  EXPECT_FALSE(done.has_durable_step());
}

TEST_F(SnapshotRoundTest, AManifestThatHangsFailsItToo) {
  const uint64_t attempt = Commit(minutes(10));
  ASSERT_FALSE(snapshots_.OnWritten(now_, Written(attempt, 0)).has_value());
  ASSERT_TRUE(snapshots_.OnWritten(now_, Written(attempt, 1)).has_value());
  v1::ManifestWritten hung = Manifest(attempt);
  hung.set_error("it hangs");
  hung.set_reason(kHangs);
  const auto finished = snapshots_.OnManifestWritten(now_, hung);
  ASSERT_TRUE(finished.has_value());
  EXPECT_EQ(finished->done.reason(), kHangs);
  EXPECT_EQ(finished->done.failed(), 1);
  EXPECT_FALSE(snapshots_.durable_step().has_value());
}

TEST_F(SnapshotRoundTest, TheManifestSaysHowLongAllNodesTook) {
  const uint64_t attempt = Commit(minutes(10));
  now_ += std::chrono::milliseconds(1500);
  ASSERT_FALSE(snapshots_.OnWritten(now_, Written(attempt, 0)).has_value());
  now_ += std::chrono::milliseconds(750);
  const auto write = snapshots_.OnWritten(now_, Written(attempt, 1));
  ASSERT_TRUE(write.has_value());
  EXPECT_EQ(write->manifest().took().seconds(), 2);
  EXPECT_EQ(write->manifest().took().nanos(), 250'000'000);
}

TEST_F(SnapshotRoundTest, ADecisionThatIsToldAgainIsNoNewState) {
  const uint64_t attempt = Commit(minutes(10));
  ASSERT_NE(attempt, 0U);
  --step_;  // the nodes of a new epoch are told the last commit once more
  EXPECT_EQ(Commit(minutes(10)), 0U);
  EXPECT_FALSE(snapshots_.has_newest());
  for (const int32_t node : {0, 1}) (void)snapshots_.OnWritten(now_, Written(attempt, node));
  ASSERT_TRUE(snapshots_.OnManifestWritten(now_, Manifest(attempt)).has_value());
  EXPECT_TRUE(snapshots_.has_newest());
}

TEST_F(SnapshotRoundTest, TheNextOneIsTriedWhenItFallsDueAndEachThatFailsIsCounted) {
  for (int failed = 1; failed <= 3; ++failed) {
    EXPECT_EQ(Commit(minutes(9)), 0U) << "not at once: the cause is likely still there";
    const uint64_t attempt = Commit(minutes(1));
    ASSERT_NE(attempt, 0U);
    EXPECT_EQ(FailBecauseNodeOneHangs(attempt).failed(), failed);
  }
  const uint64_t attempt = Commit(minutes(10));
  ASSERT_FALSE(snapshots_.OnWritten(now_, Written(attempt, 0)).has_value());
  ASSERT_TRUE(snapshots_.OnWritten(now_, Written(attempt, 1)).has_value());
  const auto finished = snapshots_.OnManifestWritten(now_, Manifest(attempt));
  ASSERT_TRUE(finished.has_value());
  EXPECT_EQ(finished->done.error(), "");
  EXPECT_EQ(finished->done.durable_step(), step_);
  EXPECT_EQ(finished->done.failed(), 3);
}

// Nothing of a snapshot that has failed comes into a later one, or makes it exist.
TEST_F(SnapshotRoundTest, AnAnswerThatComesLateCountsForNothing) {
  const uint64_t first = Commit(minutes(10));
  FailBecauseNodeOneHangs(first);
  EXPECT_FALSE(snapshots_.OnWritten(now_, Written(first, 1)).has_value());
  EXPECT_FALSE(snapshots_.OnManifestWritten(now_, Manifest(first)).has_value());
  EXPECT_FALSE(snapshots_.durable_step().has_value());
  const uint64_t second = Commit(minutes(10));
  ASSERT_EQ(second, 2U);
  EXPECT_FALSE(snapshots_.OnWritten(now_, Written(second, 0)).has_value());
  EXPECT_FALSE(snapshots_.OnWritten(now_, Written(first, 1)).has_value());
  EXPECT_FALSE(snapshots_.OnManifestWritten(now_, Manifest(first)).has_value());
  const std::optional<v1::WriteManifest> write = snapshots_.OnWritten(now_, Written(second, 1));
  ASSERT_TRUE(write.has_value());
  EXPECT_THAT(Names(*write), ElementsAre("lane-0.of-2", "lane-1.of-2"));
}

// Somebody asks while one that will fail is being written: the state has gone on since.
TEST_F(SnapshotRoundTest, WhoWaitsForTheNextOneGetsItsAnswer) {
  const uint64_t first = Commit(minutes(10));
  EXPECT_EQ(Commit(minutes(1)), 0U);
  const SnapshotRound::Answer answer = snapshots_.OnRequest(now_);
  EXPECT_FALSE(answer.save.has_value() || answer.done.has_value()) << "its turn comes";
  EXPECT_FALSE(snapshots_.OnWritten(now_, GivenUp(first, 1)).has_value());
  ASSERT_TRUE(snapshots_.OnWritten(now_, Written(first, 0)).has_value());
  const auto finished = snapshots_.OnManifestWritten(now_, Manifest(first));
  ASSERT_TRUE(finished.has_value() && finished->save.has_value());
  EXPECT_EQ(finished->save->attempt(), 2U);
  EXPECT_EQ(FailBecauseNodeOneHangs(2).reason(), kHangs);
}

}  // namespace
}  // namespace dmuond::scheduler
