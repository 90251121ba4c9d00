#include "scheduler/job/departure.h"

#include <gtest/gtest.h>

#include <chrono>
#include <utility>
#include <variant>
#include <vector>

#include "scheduler/reason.h"
#include "tests/scheduler/job/node_job_fixture.h"

namespace dmuond::scheduler {
namespace {

using std::chrono::seconds;

class DepartureOfAJobTest : public NodeJobFixture {
 protected:
  DepartureOfAJobTest() : NodeJobFixture(/*hands_over=*/false) {}
  Departure departure_;
};

TEST(DepartureTest, ANodeWithoutAJobGoesAtOnce) {
  NodeJob job({});
  (void)job.OnFormed(TimePoint(), 1);
  Departure departure;
  EXPECT_FALSE(departure.begun());
  EXPECT_TRUE(departure.Begin(job, TimePoint() + seconds(5), seconds(2), true).empty());
  EXPECT_TRUE(job.leaves());
  (void)departure.Advance(TimePoint(), job);
  EXPECT_EQ(departure.state(), Departure::State::kPrepared);
  EXPECT_TRUE(departure.saved().ok());
}

TEST(DepartureTest, NoSessionOpensOnANodeThatLeaves) {
  NodeJob job({});
  (void)job.OnFormed(TimePoint(), 1);
  Departure departure;
  (void)departure.Begin(job, TimePoint() + seconds(5), seconds(2), true);
  node::Actions actions;
  const auto answer = job.Open(TimePoint(), {.id = 1, .world_size = 1, .job = "job"}, {}, actions);
  ASSERT_TRUE(std::holds_alternative<absl::Status>(answer));
  EXPECT_EQ(ReasonOf(std::get<absl::Status>(answer)), "DRAINING");
}

TEST_F(DepartureOfAJobTest, WithoutSnapshotsABrokenGroupIsNotWaitedFor) {
  Run();
  Commit(1, 1);
  Perform(departure_.Begin(job_, now_ + seconds(5), seconds(2), /*saves=*/false));
  EXPECT_EQ(departure_.state(), Departure::State::kHalting);
  EXPECT_FALSE(departure_.HasNews(job_));
  Perform(job_.OnBroken(now_, "node 0 has left"));
  EXPECT_TRUE(departure_.HasNews(job_));
  Perform(departure_.Advance(now_, job_));
  EXPECT_EQ(departure_.state(), Departure::State::kPrepared);
  EXPECT_TRUE(departure_.saved().ok());
}

// Seen when all daemons of a group were told to leave: the first to go broke the others' links, and
// with them went the news that the snapshot existed. The last one waited for it to the deadline,
// and said that steps were lost.
TEST_F(DepartureOfAJobTest, WhoHasNotHeardThatAllIsSavedFindsItInTheDirectory) {
  Run();
  const SnapshotId step1 = Commit(1, 1);
  OpenAttempt(2, 2);
  Perform(departure_.Begin(job_, now_ + seconds(5), seconds(2), /*saves=*/true));
  Halt(/*leaver=*/0);
  Perform(departure_.Advance(now_, job_));
  EXPECT_EQ(departure_.state(), Departure::State::kSaving);
  EXPECT_FALSE(departure_.LooksForSnapshot(job_)) << "the coordinator says so";
  v1::CoordinatorMessage save;
  save.mutable_save()->set_attempt(step1.attempt.value());
  save.mutable_save()->set_step(1);
  Hear(save);
  Perform(job_.OnBroken(now_, "others leave"));
  EXPECT_TRUE(departure_.HasNews(job_));
  Perform(departure_.Advance(now_, job_));
  EXPECT_EQ(departure_.state(), Departure::State::kHalting);
  EXPECT_TRUE(departure_.LooksForSnapshot(job_));
  job_.OnSnapshotSeen({Attempt(step1.attempt.value() - 1), StepId(0)});
  EXPECT_FALSE(departure_.HasNews(job_)) << "an older one";
  job_.OnSnapshotSeen(step1);
  EXPECT_FALSE(departure_.LooksForSnapshot(job_));
  EXPECT_TRUE(departure_.HasNews(job_));
  Perform(departure_.Advance(now_, job_));
  EXPECT_EQ(departure_.state(), Departure::State::kPrepared);
  EXPECT_TRUE(departure_.saved().ok()) << departure_.saved();
}

// It waited out its time, and said that steps were lost.
TEST_F(DepartureOfAJobTest, AParkedJobThatIsSavedIsLeftAtOnceAndGetsNoLanes) {
  Run();
  const SnapshotId step1 = Commit(1, 1);
  OpenAttempt(2, 2);
  v1::CoordinatorMessage parked;
  parked.mutable_parked()->set_why("lanes die");
  Hear(parked);
  Perform(departure_.Begin(job_, now_ + seconds(5), seconds(2), /*saves=*/true));
  EXPECT_FALSE(departure_.HasNews(job_)) << "its state is in memory alone";
  job_.OnSnapshotSeen(step1);
  EXPECT_TRUE(departure_.HasNews(job_));
  Perform(departure_.Advance(now_, job_));
  EXPECT_EQ(departure_.state(), Departure::State::kPrepared);
  EXPECT_TRUE(departure_.saved().ok()) << departure_.saved();
  // It is tried again before the daemon has gone: a step that came of that would be lost.
  Reform(kEpoch + 1);
  EXPECT_TRUE(job_.parked());
  EXPECT_EQ(LastTold(&v1::MemberMessage::has_plan_ready).plan_ready().reason(), "DRAINING");
}

}  // namespace
}  // namespace dmuond::scheduler
