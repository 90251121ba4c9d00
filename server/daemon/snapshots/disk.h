// A thread that works in the snapshot directory. It is seen here whether its operation there hangs.
//
//   Disk disk(storage, timeout);
//   disk.Post([&] { … WriteNodeFiles(disk.storage(), …) … });
//   every 100 ms: switch (disk.OnTick(now)) …
//
// Threads: Post(), Stop() and Current() by any, storage() by the work alone, the rest under the
// caller's lock.
#ifndef DMUOND_SERVER_DAEMON_SNAPSHOTS_DISK_H_
#define DMUOND_SERVER_DAEMON_SNAPSHOTS_DISK_H_

#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "scheduler/step.h"
#include "server/daemon/snapshots/disk_watch.h"
#include "server/daemon/work_thread.h"
#include "server/storage/watched_storage.h"

namespace dmuond::server {

class Disk {
 public:
  // `storage` must outlive it. An operation there that takes longer than `timeout` hangs.
  Disk(storage::Storage& storage, std::chrono::milliseconds timeout)
      : storage_(storage), watch_(timeout) {}

  [[nodiscard]] storage::Storage& storage() { return storage_; }
  void Post(WorkThread::Work work) { thread_.Post(std::move(work)); }
  // As WorkThread's.
  bool Stop(std::chrono::steady_clock::time_point deadline) { return thread_.Stop(deadline); }
  // The operation under way, such as "write to /shared/…"; nullopt: none is.
  [[nodiscard]] std::optional<std::string> Current() const;

  // An operation that hangs.
  struct Hang {
    std::string what;
    std::string since;  // RFC 3339
    [[nodiscard]] std::string Words() const;
  };
  // Every 100 ms. kAnswers: hang() is the one that has ended, until the next call.
  DiskWatch::News OnTick(scheduler::TimePoint now);
  [[nodiscard]] bool hangs() const { return watch_.hangs(); }
  // REQUIRES: it hangs, or has until now.
  [[nodiscard]] const Hang& hang() const { return hang_; }

 private:
  storage::WatchedStorage storage_;
  DiskWatch watch_;
  Hang hang_;
  WorkThread thread_;  // the last: it uses the others
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_SNAPSHOTS_DISK_H_
