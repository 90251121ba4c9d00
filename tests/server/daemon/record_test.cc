// Nothing is done or said before the job's record has it.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "dmuond/wire/timeline.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "scheduler/job/job_record.h"
#include "scheduler/job/node_job.h"
#include "scheduler/job/planned_job.h"
#include "server/daemon/memory/record_file.h"
#include "tests/server/daemon/member_fixture.h"
#include "tests/server/daemon/sessions_fixture.h"

namespace dmuond::server {
namespace {

using ::testing::ElementsAre;

// REQUIRES: the daemon's lock.
absl::StatusOr<scheduler::JobRecord> RecordOf(Core& core) DMUOND_REQUIRES(core.mutex) {
  absl::StatusOr<std::string> bytes = ReadRecord(core.record.fd());
  if (!bytes.ok()) return bytes.status();
  return scheduler::ParseJobRecord(*bytes);
}

class RecordTest : public SessionsTest {};
class MembersRecordTest : public MemberTest {};

TEST_F(RecordTest, TheRecordHasWhatATrainerHasHeard) {
  Core& core = daemon_->place(0).core;
  const auto trainer = NewTrainer();
  ASSERT_TRUE(trainer->Begin(0, 1).ok());
  for (int64_t step = 1; step <= 20; ++step) {
    v1::SubmitStepRequest request = trainer->SubmitRequest(step);
    request.set_trainer_state(absl::StrCat("after step ", step));
    wire::Advance(trainer->page().ready(0), trainer->attempt());
    wire::Advance(trainer->page().submitted(), trainer->attempt());
    v1::SubmitStepReply reply;
    const absl::Status submitted = trainer->Submit(request, &reply);
    ASSERT_TRUE(submitted.ok()) << submitted;
    ASSERT_EQ(reply.outcome().kind(), v1::Outcome::KIND_COMMITTED);
    trainer->set_attempt(reply.outcome().next_attempt());
    const StateLock lock(core.mutex);
    const absl::StatusOr<scheduler::JobRecord> record = RecordOf(core);
    ASSERT_TRUE(record.ok()) << record.status();
    EXPECT_EQ(record->progress().steps().last_committed(), step);
    EXPECT_EQ(record->progress().applied_attempt(), reply.outcome().attempt());
    ASSERT_EQ(record->trainer_states_size(), 1);
    EXPECT_EQ(record->trainer_states(0).state(), request.trainer_state());
  }
  // A fresh NodeJob has the job from it.
  const StateLock lock(core.mutex);
  const absl::StatusOr<scheduler::JobRecord> record = RecordOf(core);
  ASSERT_TRUE(record.ok()) << record.status();
  auto planned = scheduler::MakePlannedJob(record->plan().inputs());
  ASSERT_TRUE(planned.ok()) << planned.status();
  auto successor =
      scheduler::NodeJob::FromRecord({.lanes = 2}, *record, *std::move(planned), core.started);
  ASSERT_TRUE(successor.ok()) << successor.status();
  EXPECT_EQ(successor->LastCommitted(), 20);
  EXPECT_EQ(successor->plan()->digest, core.job.plan()->digest);
  EXPECT_EQ(successor->ranks().StateOf(0), scheduler::RankTable::State::kAttached);
}

// All that an event orders is performed in one loop, of which the start of a lane can be seen here.
TEST_F(RecordTest, TheRecordHasWhyLanesAreStarted) {
  Core& core = daemon_->place(0).core;
  int started = 0;
  device_.Watch([&](scheduler::LaneIndex /*lane*/) DMUOND_REQUIRES(core.mutex) {
    ++started;
    const absl::StatusOr<scheduler::JobRecord> record = RecordOf(core);
    ASSERT_TRUE(record.ok()) << record.status();
    EXPECT_TRUE(record->progress().prepared());
    EXPECT_EQ(record->progress().phase(), v1::RecordedProgress::PHASE_STARTING);
  });
  const auto trainer = NewTrainer();
  const absl::Status begun = trainer->Begin(0, 1);
  ASSERT_TRUE(begun.ok()) << begun;
  const StateLock lock(core.mutex);
  EXPECT_EQ(started, 2);
}

TEST_F(MembersRecordTest, TheRecordHasWhatTheCoordinatorIsTold) {
  Core& core = daemon_->place(0).core;
  int opened = 0;
  int gone = 0;
  links_.Watch(
      [&](const v1::MemberMessage& told) DMUOND_REQUIRES(core.mutex) {
        const absl::StatusOr<scheduler::JobRecord> record = RecordOf(core);
        ASSERT_TRUE(record.ok()) << record.status();
        if (told.has_rank_session()) {
          ++opened;
          ASSERT_EQ(record->sessions_size(), 1);
          EXPECT_EQ(record->sessions(0).incarnation(), told.rank_session().incarnation());
        }
        if (told.has_rank_gone()) {
          ++gone;
          EXPECT_EQ(record->sessions_size(), 0);
          // A job that registers ends with its last session.
          EXPECT_EQ(record->progress().phase(), v1::RecordedProgress::PHASE_UNSPECIFIED);
        }
      },
      nullptr);
  const auto trainer = NewTrainer();
  ASSERT_TRUE(trainer->Open().ok());
  EXPECT_TRUE(trainer->Close().ok());
  const StateLock lock(core.mutex);
  EXPECT_EQ(opened, 1);
  EXPECT_EQ(gone, 1);
}

// Node 0 of two: its own job hears what the coordinator, which is of the same process, has decided.
class CoordinatorsRecordTest : public MemberTest {
 protected:
  void Join(DaemonOptions& options) override {
    MemberTest::Join(options);
    options.node = 0;
    options.coordinator.nodes = 2;
  }
};

TEST_F(CoordinatorsRecordTest, TheRecordHasWhatIsDecidedBeforeOtherNodesHearOfIt) {
  Core& core = daemon_->place(0).core;
  std::vector<std::string> said;
  links_.Watch(nullptr, [&](const v1::CoordinatorMessage& message) DMUOND_REQUIRES(core.mutex) {
    const absl::StatusOr<scheduler::JobRecord> record = RecordOf(core);
    ASSERT_TRUE(record.ok()) << record.status();
    if (message.has_plan()) {
      EXPECT_EQ(record->plan().inputs().job_incarnation(), message.plan().job_incarnation());
      said.push_back(message.plan().job());
    }
    if (message.has_job_ended()) {
      EXPECT_FALSE(record->has_plan());
      said.push_back("the end");
    }
  });
  const StateLock lock(core.mutex);
  scheduler::GroupActions plans;
  *plans.messages.emplace_back().message.mutable_plan() = PlanOf("raw");
  core.Do(std::move(plans));
  scheduler::GroupActions ends;
  ends.messages.emplace_back().message.mutable_job_ended()->set_job("raw");
  core.Do(std::move(ends));
  EXPECT_THAT(said, ElementsAre("raw", "the end"));
}

}  // namespace
}  // namespace dmuond::server
