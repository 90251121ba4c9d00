#include "scheduler/awaited.h"

#include <chrono>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/scheduler/step_group.h"

namespace dmuond::scheduler {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::IsEmpty;
using ::testing::Optional;

constexpr Patience kPatience{.registration = seconds(120),
                             .step = seconds(300),
                             .work = seconds(300),
                             .replacement = seconds(600)};
const TimePoint kStart{seconds(1000)};

TEST(AwaitedTest, ARankThatDiedIsNamedWithItsPidAndWhatComesOfIt) {
  JobLacks lacks;
  lacks.places[1] = {.node = 0, .pid = 4711};
  lacks.steps.emplace().dead.emplace(TrainerRank(1), kStart);
  const std::vector<Awaited> awaited = WhoIsAwaited(lacks, kPatience);
  ASSERT_EQ(awaited.size(), 1U);
  EXPECT_EQ(awaited[0].what, "rank 1 (pid 4711 on node 0), whose trainer has died");
  EXPECT_EQ(awaited[0].since, kStart);
  EXPECT_EQ(awaited[0].until, kStart + kPatience.replacement);
  EXPECT_EQ(awaited[0].otherwise,
            "the job ends with TRAINER_MISSING, unless a replacement has come");
  lacks.places[1] = {.node = 0, .pid = 4800, .open = true};
  EXPECT_EQ(WhoIsAwaited(lacks, kPatience)[0].what,
            "rank 1 (pid 4800 on node 0), a replacement that is not attached yet");
}

TEST(AwaitedTest, WhoIsAwaitedTheLongestComesFirst) {
  JobLacks lacks;
  lacks.unregistered = {2};
  lacks.registering_since = kStart + seconds(1);
  lacks.preparing = {{1, "lane 0 to be ready"}};
  lacks.preparing_since = kStart;
  EXPECT_THAT(WhoIsAwaited(lacks, kPatience),
              ElementsAre(Field(&Awaited::what, "node 1, which gets ready: lane 0 to be ready"),
                          Field(&Awaited::what, "rank 2, which has not registered")));
}

TEST(AwaitedTest, OfAWorldOfThousandsTheFirstAreNamedAndTheOthersCounted) {
  JobLacks lacks;
  for (int32_t rank = 0; rank < 1000; ++rank) lacks.unregistered.push_back(rank);
  const std::vector<Awaited> awaited = WhoIsAwaited(lacks, kPatience);
  ASSERT_EQ(awaited.size(), 17U);
  EXPECT_EQ(awaited.back().what, "984 more");
}

TEST(AwaitedTest, NothingIsToldOfAShortWaitAndNothingTwice) {
  const std::vector<Awaited> awaited = {{"rank 1", kStart, std::nullopt, ""}};
  AwaitedNews news;
  EXPECT_EQ(news.Update(kStart + kAwaitedQuiet - milliseconds(1), awaited), std::nullopt);
  EXPECT_THAT(news.Update(kStart + kAwaitedQuiet, awaited), Optional(awaited));
  EXPECT_EQ(news.Update(kStart + seconds(60), awaited), std::nullopt);
  EXPECT_THAT(news.Update(kStart + seconds(61), {}), Optional(IsEmpty()));
  EXPECT_EQ(news.Update(kStart + seconds(62), {}), std::nullopt);
}

TEST(AwaitedTest, AStepLacksWhoHasNotSubmittedThenWhoHasNotVotedAndWhoHasDied) {
  CoordinatorOptions options;
  options.session_linger = seconds(600);
  testing::StepGroup group(testing::World(2, 1, 1).Replicate(testing::Muon("w", {64, 32})),
                           StepId(0), options);
  EXPECT_THAT(group.coordinator->Lacks().silent, IsEmpty()) << "nobody waits for anybody";
  std::ignore = group.coordinator->OnSubmission(kStart, group.Step(0));
  StepLacks lacks = group.coordinator->Lacks();
  EXPECT_THAT(lacks.silent, ElementsAre(TrainerRank(1)));
  EXPECT_EQ(lacks.first_at, kStart);
  std::ignore = group.coordinator->OnSubmission(kStart + seconds(1), group.Step(1));
  lacks = group.coordinator->Lacks();
  EXPECT_THAT(lacks.silent, IsEmpty());
  EXPECT_THAT(lacks.gathering, ElementsAre(NodeRank(0)));
  EXPECT_EQ(lacks.last_at, kStart + seconds(1));
  std::ignore = group.coordinator->OnRankGone(kStart + seconds(2), TrainerRank(1), 0, "it died");
  lacks = group.coordinator->Lacks();
  EXPECT_THAT(lacks.gathering, IsEmpty()) << "of the attempt that ended with it";
  EXPECT_THAT(lacks.dead, ElementsAre(std::pair(TrainerRank(1), kStart + seconds(2))));
}

}  // namespace
}  // namespace dmuond::scheduler
