// Limits how many bytes of registrations may be arriving at a time, of one session and of all.
//
//   LayoutBytes::Held held(bytes, key.session());
//   RETURN_IF_ERROR(held.Add(part.ByteSizeLong()));
//
// Threads: any; a Held is one call's.
#ifndef DMUOND_SERVER_DAEMON_CALLS_LAYOUT_BYTES_H_
#define DMUOND_SERVER_DAEMON_CALLS_LAYOUT_BYTES_H_

#include <cstdint>
#include <map>

#include "absl/status/status.h"
#include "base/mutex.h"
#include "server/common/errors.h"

namespace dmuond::server {

class LayoutBytes {
 public:
  // Twenty times the size of 20,000 parameters. A call that is repeated while its first try waits
  // counts twice.
  static constexpr int64_t kSessionMax = int64_t{128} << 20;
  static constexpr int64_t kAllMax = int64_t{1} << 30;

  // The bytes that one call holds, until it ends.
  class Held {
   public:
    Held(LayoutBytes& all, uint64_t session) : all_(all), session_(session) {}
    ~Held() { all_.GiveBack(session_, bytes_); }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

    // RESOURCE_EXHAUSTED, reason LAYOUT_TOO_LARGE, names what is held and the limit.
    absl::Status Add(int64_t bytes) {
      absl::Status added = all_.Take(session_, bytes);
      if (added.ok()) bytes_ += bytes;
      return added;
    }

   private:
    LayoutBytes& all_;
    const uint64_t session_;
    int64_t bytes_ = 0;
  };

 private:
  absl::Status Take(uint64_t session, int64_t bytes) {
    MutexLock lock(mutex_);
    const auto found = sessions_.find(session);
    const int64_t held = found == sessions_.end() ? 0 : found->second;
    if (held + bytes > kSessionMax) {
      return Error(absl::StatusCode::kResourceExhausted, "LAYOUT_TOO_LARGE",
                   Say("a session's registrations that come in have ", Named("bytes", held + bytes),
                       " bytes, at most ", Named("limit_bytes", kSessionMax), " are taken"));
    }
    if (all_ + bytes > kAllMax) {
      return Error(absl::StatusCode::kResourceExhausted, "LAYOUT_TOO_LARGE",
                   Say("the registrations that come in have ", Named("bytes", all_ + bytes),
                       " bytes together, at most ", Named("limit_bytes", kAllMax),
                       " are taken: register again when the others have"));
    }
    sessions_[session] = held + bytes;
    all_ += bytes;
    return absl::OkStatus();
  }
  void GiveBack(uint64_t session, int64_t bytes) {
    if (bytes == 0) return;
    MutexLock lock(mutex_);
    all_ -= bytes;
    if ((sessions_[session] -= bytes) == 0) sessions_.erase(session);
  }

  Mutex mutex_;
  int64_t all_ DMUOND_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, int64_t> sessions_ DMUOND_GUARDED_BY(mutex_);
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_LAYOUT_BYTES_H_
