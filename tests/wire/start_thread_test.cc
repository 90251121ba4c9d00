#include "dmuond/wire/start_thread.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace dmuond::wire {
namespace {

TEST(StartThreadTest, TheThreadRuns) {
  int ran = 0;
  absl::StatusOr<std::thread> thread = StartThread("a test", [&ran] { ran = 1; });
  ASSERT_TRUE(thread.ok()) << thread.status();
  thread->join();
  EXPECT_EQ(ran, 1);
}

// A process of its own: its user may have no other.
TEST(StartThreadDeathTest, WithoutAThreadTheErrorSaysWhatForAndWhichLimits) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become a user without processes";
  constexpr uid_t kNobodyElse = 64'322;
  const auto start = [] {
    const rlimit none{0, 0};
    if (::setuid(kNobodyElse) != 0 || ::setrlimit(RLIMIT_NPROC, &none) != 0) std::_Exit(2);
    const absl::StatusOr<std::thread> thread = StartThread("a lane", [] {});
    std::fprintf(stderr, "%s\n", thread.status().ToString().c_str());
    std::_Exit(absl::IsResourceExhausted(thread.status()) ? 0 : 1);
  };
  EXPECT_EXIT(start(), ::testing::ExitedWithCode(0),
              "no thread can be started for a lane: Resource temporarily unavailable.*ulimit -u.*"
              "pids.max");
}

}  // namespace
}  // namespace dmuond::wire
