// One direction of a stream between daemons: messages queue here and a thread writes them, so that
// no caller blocks. A large message is cut into parts (message_parts.h), once for all its streams.
// Heartbeats wait behind the parts, and each part counts as a heartbeat.
//
// Threads: any.
#ifndef DMUOND_SERVER_DAEMON_GROUP_STREAM_WRITER_H_
#define DMUOND_SERVER_DAEMON_GROUP_STREAM_WRITER_H_

#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "dmuond/wire/start_thread.h"
#include "server/daemon/group/message_parts.h"

namespace dmuond::server {

template <typename Message>
using SharedParts = std::shared_ptr<const std::vector<Message>>;

template <typename Message>
SharedParts<Message> ShareParts(Message message) {
  return std::make_shared<const std::vector<Message>>(CutIntoParts(std::move(message)));
}

template <typename Message>
class StreamWriter {
 public:
  // `write` returns false when the stream has ended.
  explicit StreamWriter(std::function<bool(const Message&)> write) : write_(std::move(write)) {}
  // Before it, messages wait. RESOURCE_EXHAUSTED: there is no thread for it.
  absl::Status Start() {
    absl::StatusOr<std::thread> thread =
        wire::StartThread("a stream between daemons", [this] { Run(); });
    if (!thread.ok()) return thread.status();
    thread_ = *std::move(thread);
    return absl::OkStatus();
  }
  // Writes what was pushed, as long as the stream is there.
  ~StreamWriter() {
    {
      MutexLock lock(mutex_);
      stop_ = true;
      changed_.NotifyAll();
    }
    if (thread_.joinable()) thread_.join();
  }
  void Push(Message message) { Push(ShareParts(std::move(message))); }
  void Push(SharedParts<Message> parts) {
    MutexLock lock(mutex_);
    queue_.push_back(std::move(parts));
    changed_.NotifyAll();
  }

 private:
  void Run() {
    for (;;) {
      SharedParts<Message> parts;
      {
        MutexLock lock(mutex_);
        while (queue_.empty() && !stop_) changed_.Wait(mutex_);
        if (queue_.empty()) return;
        parts = std::move(queue_.front());
        queue_.pop_front();
      }
      for (const Message& part : *parts) {
        if (!write_(part)) return;  // the reader of the same stream sees its end
      }
    }
  }

  const std::function<bool(const Message&)> write_;
  Mutex mutex_;
  CondVar changed_;
  bool stop_ DMUOND_GUARDED_BY(mutex_) = false;
  std::deque<SharedParts<Message>> queue_ DMUOND_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_STREAM_WRITER_H_
