// What a thread does that accepts the connections of a listening socket: it waits for them, and for
// what becomes of descriptors that its owner watches. Where no descriptor is left it accepts again
// 100 ms later, again and again; the log says so once for each such pause.
//
//   auto loop = AcceptLoop::Make("metrics", listener);
//   std::thread thread([&] { (*loop)->Run({.on_connection = …, .on_ready = …, .on_round = …}); });
//   (*loop)->Stop();                                                  // then the thread's join()
//
// Threads: one thread calls Run(), which calls all events and alone may call NewId(); any thread
// may call the other functions.
#ifndef DMUOND_SERVER_DAEMON_CALLS_ACCEPT_LOOP_H_
#define DMUOND_SERVER_DAEMON_CALLS_ACCEPT_LOOP_H_

#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "server/common/seldom.h"

namespace dmuond::server {

class AcceptLoop {
 public:
  struct Events {
    // It is non-blocking, and closed on exec.
    std::function<void(wire::UniqueFd socket, const sockaddr_storage& from)> on_connection;
    std::function<void(uint64_t id)> on_ready;  // of Watch()
    // After each round of the others, and soon after Wake(). True: also 100 ms from now.
    std::function<bool()> on_round;
  };
  // `name`: of the listener, for the log. `listener` is non-blocking, and outlives it.
  static absl::StatusOr<std::unique_ptr<AcceptLoop>> Make(std::string name, int listener);

  void Run(const Events& events);  // until Stop()
  void Stop();
  void Wake() const;

  // For `what` of epoll's events, in place of what was there before. False: the kernel has no
  // memory. What is closed by all who have it is watched no more.
  [[nodiscard]] bool Watch(int fd, uint64_t id, uint32_t what) const;
  void Forget(int fd) const;
  [[nodiscard]] uint64_t NewId() { return next_id_++; }  // of Run()'s thread

 private:
  AcceptLoop(std::string name, int listener, wire::UniqueFd wake, wire::UniqueFd events)
      : name_(std::move(name)),
        listener_(listener),
        wake_(std::move(wake)),
        events_(std::move(events)) {}
  void AcceptSome(const Events& events);
  void Pause(const absl::Status& why);

  // Until it looks again, and accepts after running out of descriptors: the listener stays
  // readable.
  static constexpr std::chrono::milliseconds kAgain{100};

  const std::string name_;
  const int listener_;
  const wire::UniqueFd wake_;    // an eventfd
  const wire::UniqueFd events_;  // an epoll descriptor
  std::atomic<bool> stop_ = false;
  // ---- of the thread that runs it ----
  bool accepting_ = false;
  bool paused_ = false;  // accept has failed, and has not worked since
  Seldom pauses_;
  std::chrono::steady_clock::time_point accept_again_{};
  uint64_t next_id_ = 2;  // after those of the listener and of `wake_`
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_ACCEPT_LOOP_H_
