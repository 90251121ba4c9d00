#include "client/cpp/src/wait_notice.h"

#include <chrono>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dmuond::client {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::EndsWith;
using ::testing::StartsWith;

const WaitNotice::Clock::time_point kStart{seconds(1000)};

v1::WaitStepReply Dead(int ranks = 1) {
  v1::WaitStepReply reply;
  for (int i = 0; i < ranks; ++i) {
    v1::Awaited& awaited = *reply.add_awaited();
    awaited.set_what("rank 1 (pid 4711 on node 0), whose trainer has died");
    awaited.set_since_ms(22'000);
    awaited.set_patience_ms(595'000);
    awaited.set_otherwise("the job ends with TRAINER_MISSING, unless a replacement has come");
  }
  return reply;
}

TEST(WaitNoticeTest, AfterFiveSecondsItIsSaidWhoIsAwaitedAndWhatComesOfIt) {
  WaitNotice notice(3, 17, kStart);
  EXPECT_EQ(notice.Left(kStart), seconds(5));
  EXPECT_EQ(notice.Hear(Dead(), kStart + milliseconds(4999)), "");
  EXPECT_EQ(notice.Hear({}, kStart + seconds(5)), "") << "the daemon does not say";
  EXPECT_EQ(notice.Left(kStart + seconds(5)), milliseconds(500)) << "so it is asked again soon";
  EXPECT_EQ(notice.Hear(Dead(), kStart + milliseconds(5100)),
            "rank 3: step 17 has waited 5 s so far, for rank 1 (pid 4711 on node 0), whose trainer "
            "has died (awaited for 22 s; in 9 min 55 s the job ends with TRAINER_MISSING, unless a "
            "replacement has come)");
  EXPECT_EQ(notice.End(kStart + seconds(125)), "rank 3: step 17 goes on after 2 min 5 s");
}

TEST(WaitNoticeTest, ItIsSaidLessAndLessOften) {
  WaitNotice notice(0, 1, kStart);
  std::vector<int64_t> said;
  for (seconds at(0); at < seconds(1000); ++at) {
    if (!notice.Hear(Dead(), kStart + at).empty()) said.push_back(at.count());
  }
  EXPECT_THAT(said, ::testing::ElementsAre(5, 30, 60, 120, 240, 540, 840));
}

TEST(WaitNoticeTest, OfManyTheFirstAreNamedAndAStepThatDidNotWaitIsNotMentioned) {
  WaitNotice notice(0, 1, kStart);
  EXPECT_EQ(notice.End(kStart + seconds(4)), "");
  const std::string said = notice.Hear(Dead(9), kStart + seconds(5));
  EXPECT_THAT(said, StartsWith("rank 0: step 1 has waited 5 s so far, for rank 1 "));
  EXPECT_THAT(said, EndsWith("; for 5 more"));
}

}  // namespace
}  // namespace dmuond::client
