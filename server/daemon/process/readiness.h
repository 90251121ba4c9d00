// Whether the daemon is live and ready, for probes: /livez and /readyz of --metrics_address,
// `dmuonctl ready`, and whoever waits for it. Asking waits for nothing that the daemon does.
//
// Threads: any.
#ifndef DMUOND_SERVER_DAEMON_PROCESS_READINESS_H_
#define DMUOND_SERVER_DAEMON_PROCESS_READINESS_H_

#include <chrono>
#include <functional>
#include <string>

#include "base/mutex.h"
#include "dmuond/v1/admin.pb.h"

namespace dmuond::server {

class Readiness {
 public:
  // The core has come through a tick: it is live for 10 s from now.
  void Turned() DMUOND_EXCLUDES(mutex_);
  // Ready where nothing is lacking; `why_not` is for people.
  void SetReady(bool ready, const std::string& why_not = "") DMUOND_EXCLUDES(mutex_);
  // Nobody waits any longer, now or later.
  void Stop() DMUOND_EXCLUDES(mutex_);

  [[nodiscard]] v1::GetReadinessReply Now() DMUOND_EXCLUDES(mutex_);
  // The same when the awaited state is reached, or `wait` is over, or after Stop(), or soon after
  // `cancelled` has begun to say so.
  [[nodiscard]] v1::GetReadinessReply Await(v1::GetReadinessRequest::State awaited,
                                            std::chrono::milliseconds wait,
                                            const std::function<bool()>& cancelled)
      DMUOND_EXCLUDES(mutex_);

 private:
  [[nodiscard]] v1::GetReadinessReply Look() const DMUOND_REQUIRES(mutex_);

  Mutex mutex_;
  CondVar changed_;
  bool stopped_ DMUOND_GUARDED_BY(mutex_) = false;
  std::chrono::steady_clock::time_point live_until_ DMUOND_GUARDED_BY(mutex_);
  bool ready_ DMUOND_GUARDED_BY(mutex_) = false;
  std::string why_not_ DMUOND_GUARDED_BY(mutex_) = "the daemon is starting";
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_PROCESS_READINESS_H_
