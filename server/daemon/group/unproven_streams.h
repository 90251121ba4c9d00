// Streams whose other end has not proven yet that it belongs to the group. Anybody can open them,
// and each holds a thread, so their number and their time are limited. When there is one too many,
// the oldest ends: a daemon proves itself at once, and so gets through a flood of strangers.
//
// Threads: any.
#ifndef DMUOND_SERVER_DAEMON_GROUP_UNPROVEN_STREAMS_H_
#define DMUOND_SERVER_DAEMON_GROUP_UNPROVEN_STREAMS_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>

#include "kernels/mutex.h"

namespace dmuond::server {

class UnprovenStreams {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  UnprovenStreams(size_t streams_max, std::chrono::milliseconds patience)
      : streams_max_(streams_max), patience_(patience) {}

  // The stream is unproven as long as this lives.
  class Entry {
   public:
    Entry(UnprovenStreams& streams, uint64_t id) : streams_(&streams), id_(id) {}
    ~Entry() {
      if (streams_ != nullptr) streams_->Leave(id_);
    }
    Entry(Entry&& other) noexcept
        : streams_(std::exchange(other.streams_, nullptr)), id_(other.id_) {}
    Entry& operator=(Entry&&) = delete;

   private:
    UnprovenStreams* streams_;
    uint64_t id_;
  };
  // `cancel` ends the stream; it may be called, at most once, until the entry goes.
  [[nodiscard]] Entry Enter(TimePoint now, std::function<void()> cancel);
  // Ends those that have taken too long. Call it now and then.
  void Tick(TimePoint now);

 private:
  struct Stream {
    TimePoint began;
    std::function<void()> cancel;  // empty: called already
  };
  void Leave(uint64_t id);
  void Cancel(Stream& stream) DMUOND_REQUIRES(mutex_);

  const size_t streams_max_;
  const std::chrono::milliseconds patience_;
  Mutex mutex_;
  uint64_t last_id_ DMUOND_GUARDED_BY(mutex_) = 0;
  size_t live_ DMUOND_GUARDED_BY(mutex_) = 0;                     // those not told to end yet
  std::map<uint64_t, Stream> streams_ DMUOND_GUARDED_BY(mutex_);  // oldest first
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_UNPROVEN_STREAMS_H_
