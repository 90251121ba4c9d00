// What a daemon that is not the coordinator hears of jobs, and what becomes of its sessions.
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/common/errors.h"
#include "tests/server/daemon/member_fixture.h"

namespace dmuond::server {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Pair;

TEST_F(MemberTest, ASessionThatThePlanDoesNotKnowEndsAtOnceAndIsToldAsADeath) {
  const auto trainer = NewTrainer();
  ASSERT_TRUE(trainer->Open().ok());
  absl::Status registered;
  {
    const std::jthread waits = Register(*trainer, registered);
    HearPlan("raw");
  }
  EXPECT_EQ(ReasonOf(registered), "RANK_MOVED") << registered;
  const auto told = links_.Next(&v1::MemberMessage::has_rank_gone);
  ASSERT_TRUE(told.has_value()) << "to the coordinator its rank is taken";
  EXPECT_EQ(told->rank_gone().incarnation(), trainer->key().incarnation());
  EXPECT_FALSE(told->rank_gone().closed()) << "the job would end";
  EXPECT_EQ(ReasonOf(trainer->Close()), "RANK_MOVED") << "and whoever calls next";
}

TEST_F(MemberTest, TheEndOfASessionThatBeganAsItsJobEndedIsTold) {
  const auto trainer = NewTrainer();
  ASSERT_TRUE(trainer->Open().ok());
  HearPlan("raw");
  HearJobEnded("raw");
  const auto told = links_.Next(&v1::MemberMessage::has_rank_gone);
  ASSERT_TRUE(told.has_value()) << "to the coordinator it has begun another job";
  EXPECT_EQ(told->rank_gone().incarnation(), trainer->key().incarnation());
  EXPECT_FALSE(told->rank_gone().closed());
  EXPECT_EQ(ReasonOf(trainer->Register()), "JOB_ENDED");
}

TEST_F(MemberTest, AJobThatRegistersGivesWayToOneThatGoesBack) {
  const auto trainer = NewTrainer();
  ASSERT_TRUE(trainer->Open().ok());
  absl::Status registered;
  {
    const std::jthread waits = Register(*trainer, registered);
    HearRollBack("running");
  }
  EXPECT_EQ(ReasonOf(registered), "OTHER_JOB") << registered;
  EXPECT_THAT(std::string(registered.message()), HasSubstr("runs job 'running'"));
  ExpectPrepared("running");
  EXPECT_TRUE(links_.Next(&v1::MemberMessage::has_rank_gone).has_value());
  EXPECT_FALSE(trainer->HasFrame()) << "it would take the daemon for gone";
  EXPECT_EQ(ReasonOf(trainer->Close()), "OTHER_JOB") << "and whoever calls next";
  EXPECT_EQ(ReasonOf(trainer->Open()), "OTHER_JOB") << "and who has lost the first answer";
}

TEST_F(MemberTest, AJobThatRegistersGivesWayToThePlanOfAnother) {
  const auto trainer = NewTrainer();
  ASSERT_TRUE(trainer->Open().ok());
  HearPlan("running");
  ExpectPrepared("running");
  EXPECT_EQ(ReasonOf(trainer->Register()), "OTHER_JOB");
}

TEST_F(MemberTest, AnotherWorldGivesWayToTheJobOfItsName) {
  const auto trainer = NewTrainer();
  ASSERT_TRUE(trainer->Open(0, 2).ok());
  HearRollBack("raw");
  ExpectPrepared("raw");
  const absl::Status registered = trainer->Register();
  EXPECT_EQ(ReasonOf(registered), "WORLD_DIFFERS") << registered;
  EXPECT_THAT(MetadataOf(registered), Contains(Pair("world_size", "1")));
  EXPECT_THAT(MetadataOf(registered), Contains(Pair("given_world_size", "2")));
}

TEST_F(MemberTest, AJobThatWasLostAsItRegisteredGivesWayToTheNextOfItsName) {
  const auto trainer = NewTrainer();
  ASSERT_TRUE(trainer->Open().ok());
  daemon_->OnCoordinatorGone("the link is cut");
  daemon_->OnFormed(2);
  HearPlan("raw");
  ExpectPrepared("raw");
  EXPECT_EQ(ReasonOf(trainer->Register()), "JOB_ENDED") << "it may begin anew";
}

TEST_F(MemberTest, APlanThatMeetsAnotherPlannedJobIsAnswered) {
  HearPlan("lingering", /*times=*/2);
  HearPlan("running");
  const auto told = links_.Next(&v1::MemberMessage::has_plan_ready);
  ASSERT_TRUE(told.has_value()) << "the coordinator waits";
  EXPECT_EQ(told->plan_ready().reason(), "NODE_NOT_READY");
  EXPECT_THAT(told->plan_ready().error(),
              HasSubstr("job 'running' cannot begin before job 'lingering'"));
  ExpectPrepared("lingering");
}

}  // namespace
}  // namespace dmuond::server
