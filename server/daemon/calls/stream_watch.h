// Ends streams whose caller sends nothing, because a handler that waits for a message holds a
// thread.
//
//   StreamWatch::First first(watch, context);  // before the first Read()
//   … Read() …; first.Came();
//
// Threads: any; Tick() from one.
#ifndef DMUOND_SERVER_DAEMON_CALLS_STREAM_WATCH_H_
#define DMUOND_SERVER_DAEMON_CALLS_STREAM_WATCH_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <map>

#include "base/mutex.h"

namespace dmuond::server {

class StreamWatch {
 public:
  // Far longer than between two messages of a client that lives.
  static constexpr std::chrono::seconds kFirstMessage{30};

  explicit StreamWatch(std::chrono::milliseconds patience = kFirstMessage) : patience_(patience) {}

  // The wait for a stream's first message.
  class First {
   public:
    First(StreamWatch& watch, grpc::ServerContext* context) : watch_(watch), context_(context) {
      MutexLock lock(watch_.mutex_);
      watch_.waiting_[context_] = std::chrono::steady_clock::now() + watch_.patience_;
    }
    ~First() { Came(); }
    First(const First&) = delete;
    First& operator=(const First&) = delete;
    void Came() {
      MutexLock lock(watch_.mutex_);
      watch_.waiting_.erase(context_);
    }

   private:
    StreamWatch& watch_;
    grpc::ServerContext* const context_;
  };

  // Cancels streams whose first message is overdue: their Read() fails.
  void Tick() {
    const auto now = std::chrono::steady_clock::now();
    MutexLock lock(mutex_);
    for (auto waiting = waiting_.begin(); waiting != waiting_.end();) {
      if (now < waiting->second) {
        ++waiting;
        continue;
      }
      waiting->first->TryCancel();
      waiting = waiting_.erase(waiting);
    }
  }

 private:
  const std::chrono::milliseconds patience_;
  Mutex mutex_;
  std::map<grpc::ServerContext*, std::chrono::steady_clock::time_point> waiting_
      DMUOND_GUARDED_BY(mutex_);
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_STREAM_WATCH_H_
