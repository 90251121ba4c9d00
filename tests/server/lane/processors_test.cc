#include "server/lane/processors.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <thread>

#include "absl/strings/str_cat.h"

namespace dmuond::server::lane {
namespace {

cpu_set_t Mine() {
  cpu_set_t set;
  CPU_ZERO(&set);
  EXPECT_EQ(::sched_getaffinity(0, sizeof(set), &set), 0);
  return set;
}

int LastOf(const cpu_set_t& set) {
  int last = -1;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) last = cpu;
  }
  return last;
}

// Each in a thread of its own, which has the processors of the one that starts it.
template <typename Body>
void InAThread(Body body) {
  std::thread(body).join();
}

TEST(ProcessorsTest, AThreadStaysOnThoseOfTheListThatItMayUse) {
  InAThread([] {
    const int last = LastOf(Mine());
    // Others than these do not exist, and count for nothing.
    ASSERT_TRUE(StayNear(absl::StrCat(last, "-", last, ",", CPU_SETSIZE - 2, "-2000000")).ok());
    const cpu_set_t mine = Mine();
    EXPECT_EQ(CPU_COUNT(&mine), 1);
    EXPECT_TRUE(CPU_ISSET(last, &mine));
    InAThread([&] { EXPECT_EQ(LastOf(Mine()), last); });
  });
}

TEST(ProcessorsTest, ThoseThatItMayNotUseChangeNothing) {
  InAThread([] {
    const cpu_set_t before = Mine();
    ASSERT_TRUE(StayNear(absl::StrCat(CPU_SETSIZE - 1)).ok());
    const cpu_set_t after = Mine();
    EXPECT_TRUE(CPU_EQUAL(&before, &after));
  });
}

TEST(ProcessorsTest, WhatIsNoListIsRefused) {
  for (const char* const text : {"", "a", "3-1", "-1", "1-2-3", "1,", "0x1"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(StayNear(text))) << text;
  }
}

}  // namespace
}  // namespace dmuond::server::lane
