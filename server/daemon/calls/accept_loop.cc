#include "server/daemon/calls/accept_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <optional>
#include <utility>

#include "server/common/log.h"

namespace dmuond::server {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kListener = 0;
constexpr uint64_t kWake = 1;
// Before other events are looked at: the listener stays readable while there are more.
constexpr int kAcceptedAtOnce = 64;

}  // namespace

absl::StatusOr<std::unique_ptr<AcceptLoop>> AcceptLoop::Make(std::string name, int listener) {
  wire::UniqueFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  wire::UniqueFd events(::epoll_create1(EPOLL_CLOEXEC));
  if (!wake.valid() || !events.valid()) return absl::ErrnoToStatus(errno, "eventfd or epoll");
  std::unique_ptr<AcceptLoop> loop(
      new AcceptLoop(std::move(name), listener, std::move(wake), std::move(events)));
  if (!loop->Watch(loop->wake_.get(), kWake, EPOLLIN)) return absl::ErrnoToStatus(errno, "epoll");
  return loop;
}

void AcceptLoop::Run(const Events& events) {
  std::array<epoll_event, 64> ready;
  bool look = false;
  while (!stop_.load()) {
    if (!accepting_ && Clock::now() >= accept_again_) {
      accepting_ = Watch(listener_, kListener, EPOLLIN);
    }
    const int timeout_ms = accepting_ && !look ? -1 : static_cast<int>(kAgain.count());
    const int count =
        ::epoll_wait(events_.get(), ready.data(), static_cast<int>(ready.size()), timeout_ms);
    for (int i = 0; i < count; ++i) {
      const uint64_t id = ready[i].data.u64;
      if (id == kListener) {
        AcceptSome(events);
      } else if (id == kWake) {
        uint64_t times = 0;
        [[maybe_unused]] const ssize_t read = ::read(wake_.get(), &times, sizeof(times));
      } else {
        events.on_ready(id);
      }
    }
    look = events.on_round();
  }
}

void AcceptLoop::AcceptSome(const Events& events) {
  for (int i = 0; i < kAcceptedAtOnce; ++i) {
    sockaddr_storage from{};
    socklen_t size = sizeof(from);
    wire::UniqueFd socket(::accept4(listener_, reinterpret_cast<sockaddr*>(&from), &size,
                                    SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.valid()) {
      paused_ = false;
      events.on_connection(std::move(socket), from);
      continue;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) {
      Pause(absl::ErrnoToStatus(errno, "accept"));
    } else {
      paused_ = false;
    }
    return;
  }
}

void AcceptLoop::Pause(const absl::Status& why) {
  const Clock::time_point now = Clock::now();
  const bool said = std::exchange(paused_, true);
  const std::optional<int64_t> before = said ? std::nullopt : pauses_.Now(now);
  if (before.has_value()) {
    log::Warn(
        "no connection accepted; tried again until one is",
        {{"socket", name_}, {"error", why.message()}, {"others_since_the_last_line", *before}});
  }
  accept_again_ = now + kAgain;
  Forget(listener_);
  accepting_ = false;
}

void AcceptLoop::Stop() {
  stop_.store(true);
  Wake();
}

void AcceptLoop::Wake() const {
  const uint64_t one = 1;
  // Fails only when the counter is full, and then the thread wakes anyway.
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
}

bool AcceptLoop::Watch(int fd, uint64_t id, uint32_t what) const {
  epoll_event event{};
  event.events = what;
  event.data.u64 = id;
  return ::epoll_ctl(events_.get(), EPOLL_CTL_MOD, fd, &event) == 0 ||
         ::epoll_ctl(events_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
}

void AcceptLoop::Forget(int fd) const { ::epoll_ctl(events_.get(), EPOLL_CTL_DEL, fd, nullptr); }

}  // namespace dmuond::server
