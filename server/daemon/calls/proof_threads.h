// Threads that prove connections, one for each, of a limited number: a proof waits for who has
// connected, and the thread that accepts must not.
//
// Threads: any.
#ifndef DMUOND_SERVER_DAEMON_CALLS_PROOF_THREADS_H_
#define DMUOND_SERVER_DAEMON_CALLS_PROOF_THREADS_H_

#include <cstddef>
#include <functional>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "dmuond/wire/start_thread.h"

namespace dmuond::server {

class ProofThreads {
 public:
  explicit ProofThreads(size_t threads_max) : threads_max_(threads_max) {}
  ~ProofThreads() { Stop(); }
  ProofThreads(const ProofThreads&) = delete;
  ProofThreads& operator=(const ProofThreads&) = delete;

  // Waits while there are as many as there may be. CANCELLED: it is stopped; RESOURCE_EXHAUSTED:
  // there is no thread.
  absl::Status Begin(std::function<void()> proof) {
    MutexLock lock(mutex_);
    while (threads_ >= threads_max_ && !stop_) changed_.Wait(mutex_);
    if (stop_) return absl::CancelledError("this daemon leaves");
    absl::StatusOr<std::thread> thread =
        wire::StartThread("a daemon's proof", [this, proof = std::move(proof)] {
          proof();
          MutexLock ends(mutex_);
          --threads_;
          changed_.NotifyAll();
        });
    if (!thread.ok()) return thread.status();
    ++threads_;  // it cannot end before: the lock
    thread->detach();
    return absl::OkStatus();
  }
  // Begins no more, and waits for those that there are.
  void Stop() {
    MutexLock lock(mutex_);
    stop_ = true;
    changed_.NotifyAll();
    while (threads_ > 0) changed_.Wait(mutex_);
  }

 private:
  const size_t threads_max_;
  Mutex mutex_;
  CondVar changed_;
  size_t threads_ DMUOND_GUARDED_BY(mutex_) = 0;
  bool stop_ DMUOND_GUARDED_BY(mutex_) = false;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_PROOF_THREADS_H_
