// Limits how many calls of one session wait at a time: each holds memory, and most hold a thread.
//
//   CallsInFlight::Held held(calls, key.session());
//   RETURN_IF_ERROR(held.status());
//
// Threads: any; a Held is one call's.
#ifndef DMUOND_SERVER_DAEMON_CALLS_CALLS_IN_FLIGHT_H_
#define DMUOND_SERVER_DAEMON_CALLS_CALLS_IN_FLIGHT_H_

#include <cstdint>
#include <map>

#include "absl/status/status.h"
#include "base/mutex.h"
#include "server/common/errors.h"

namespace dmuond::server {

class CallsInFlight {
 public:
  // A client makes two or three, and repeats one that was cut off.
  static constexpr int kMax = 32;

  class Held {
   public:
    Held(CallsInFlight& all, uint64_t session) : all_(all), session_(session) {
      MutexLock lock(all_.mutex_);
      held_ = ++all_.sessions_[session_] <= kMax;
    }
    ~Held() {
      MutexLock lock(all_.mutex_);
      if (--all_.sessions_[session_] == 0) all_.sessions_.erase(session_);
    }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

    // RESOURCE_EXHAUSTED, reason CALLS_TOO_MANY.
    [[nodiscard]] absl::Status status() const {
      if (held_) return absl::OkStatus();
      return Error(absl::StatusCode::kResourceExhausted, "CALLS_TOO_MANY",
                   Say("the session has ", Named("limit", kMax), " calls that wait, and no more"));
    }

   private:
    CallsInFlight& all_;
    const uint64_t session_;
    bool held_ = false;
  };

 private:
  Mutex mutex_;
  std::map<uint64_t, int> sessions_ DMUOND_GUARDED_BY(mutex_);
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_CALLS_IN_FLIGHT_H_
