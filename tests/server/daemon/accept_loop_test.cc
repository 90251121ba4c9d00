#include "server/daemon/calls/accept_loop.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_split.h"
#include "base/unique_fd.h"
#include "server/common/log.h"

namespace dmuond::server {
namespace {

using wire::UniqueFd;

TEST(AcceptLoopTest, WithoutDescriptorsTheLogSaysSoOnceAndConnectionsAreAcceptedLater) {
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* const name = reinterpret_cast<sockaddr*>(&address);
  socklen_t size = sizeof(address);
  ASSERT_EQ(::bind(listener.get(), name, size), 0);
  ASSERT_EQ(::listen(listener.get(), 1), 0);
  ASSERT_EQ(::getsockname(listener.get(), name, &size), 0);
  const UniqueFd client(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::connect(client.get(), name, size), 0);
  auto loop = AcceptLoop::Make("metrics", listener.get());
  ASSERT_TRUE(loop.ok()) << loop.status();
  log::Flush();
  ::testing::internal::CaptureStderr();
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none{0, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);

  std::mutex mutex;
  std::condition_variable changed;
  int rounds = 0;
  int accepted = 0;
  std::thread thread([&] {
    (*loop)->Run({.on_connection =
                      [&](UniqueFd /*socket*/, const sockaddr_storage& /*from*/) {
                        const std::lock_guard lock(mutex);
                        ++accepted;
                      },
                  .on_ready = [](uint64_t /*id*/) {},
                  .on_round =
                      [&] {
                        const std::lock_guard lock(mutex);
                        ++rounds;
                        changed.notify_all();
                        return true;
                      }});
  });
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return rounds >= 8; });
  EXPECT_EQ(accepted, 0);
  EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  changed.wait(lock, [&] { return accepted == 1; });
  lock.unlock();
  (*loop)->Stop();
  thread.join();
  log::Flush();
  const std::string said = ::testing::internal::GetCapturedStderr();
  const std::vector<std::string> lines = absl::StrSplit(said, '\n', absl::SkipEmpty());
  ASSERT_EQ(lines.size(), 1U) << said;
  EXPECT_NE(lines[0].find("no connection accepted"), std::string::npos) << said;
}

}  // namespace
}  // namespace dmuond::server
