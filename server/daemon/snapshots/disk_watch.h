// Decides whether a thread that works on a disk hangs: it does if one operation takes longer than
// the timeout. All its work together has no deadline: a slow disk may take its time. Pure: time is
// passed in.
//
//   DiskWatch watch(timeout);
//   every 100 ms: switch (watch.OnTick(now, number of the operation that is under way)) …
//
// Threads: the caller's lock.
#ifndef DMUOND_SERVER_DAEMON_SNAPSHOTS_DISK_WATCH_H_
#define DMUOND_SERVER_DAEMON_SNAPSHOTS_DISK_WATCH_H_

#include <chrono>
#include <cstdint>
#include <optional>

#include "scheduler/step.h"

namespace dmuond::server {

class DiskWatch {
 public:
  explicit DiskWatch(std::chrono::milliseconds timeout) : timeout_(timeout) {}

  enum class News : uint8_t {
    kNone,
    kHangs,   // once for an operation
    kAnswers  // one that hung has ended
  };
  // Every 100 ms. `operation`: numbers of two operations differ; nullopt: none is under way.
  [[nodiscard]] News OnTick(scheduler::TimePoint now, std::optional<uint64_t> operation);

  [[nodiscard]] bool hangs() const { return hangs_; }
  // For how long the operation of the last tick has been seen under way.
  [[nodiscard]] std::chrono::milliseconds waited() const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(waited_);
  }

 private:
  const std::chrono::milliseconds timeout_;
  std::optional<scheduler::TimePoint> ticked_;
  std::optional<uint64_t> operation_;
  std::chrono::steady_clock::duration waited_{0};
  bool hangs_ = false;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_SNAPSHOTS_DISK_WATCH_H_
