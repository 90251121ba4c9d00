// Calls that hold no thread while they wait. One thread takes them from a completion queue of their
// server and begins them. The thread that brings the answer sends it.
//
//   QueuedCalls calls(builder.AddCompletionQueue(), pause);  // before the server is built
//   … BuildAndStart() …
//   … a QueuedCall for each method, which expects a request from calls.queue() …
//   calls.Serve();
//   … the server's Shutdown(), which ends all calls; the thread must still run …
//   calls.Stop();
//
// Such a server reads its connections on this thread alone: the threads of its synchronous calls
// wait for requests without polling. While this thread is busy, or waits for the daemon's lock, a
// StandIn (stand_in.h) does.
#ifndef DMUOND_SERVER_DAEMON_CALLS_QUEUED_CALLS_H_
#define DMUOND_SERVER_DAEMON_CALLS_QUEUED_CALLS_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

namespace dmuond::server {

// One call, from before its request comes until it has been answered and has ended. Its virtual
// methods run on the queue's thread. It owns itself: the last event deletes it.
class QueuedCall {
 public:
  // The queue's tags point to these: a call, and the method for what has happened to it.
  struct Event {
    QueuedCall* call;
    void (QueuedCall::*on)(bool ok);
  };

  virtual ~QueuedCall() = default;
  QueuedCall(const QueuedCall&) = delete;
  QueuedCall& operator=(const QueuedCall&) = delete;

 protected:
  QueuedCall() { context_.AsyncNotifyWhenDone(&ended_); }

  grpc::ServerContext context_;
  Event came_{this, &QueuedCall::OnCame};          // the tag of the request
  Event answered_{this, &QueuedCall::OnAnswered};  // the tag of the one Finish()

 private:
  // The request is there. Answers it, now or later.
  virtual void Begin() = 0;
  // The caller has gone, or the server ends. Has the call answered now if it is not yet.
  virtual void OnGone() = 0;

  void OnCame(bool ok) {
    if (ok) return Begin();
    delete this;  // the server ends: no request, and no other event
  }
  void OnEnded(bool /*ok*/) {
    if (context_.IsCancelled()) OnGone();
    Left();
  }
  void OnAnswered(bool /*ok*/) { Left(); }
  void Left() {
    if (--left_ == 0) delete this;
  }

  Event ended_{this, &QueuedCall::OnEnded};
  int left_ = 2;  // every call that came ends, and is answered, in either order
};

class QueuedCalls {
 public:
  // `pause` is called on the queue's thread when no event waits, and after each 64: what one does
  // for many calls at once is done there.
  QueuedCalls(std::unique_ptr<grpc::ServerCompletionQueue> queue, std::function<void()> pause)
      : queue_(std::move(queue)), pause_(std::move(pause)) {}
  ~QueuedCalls() { Stop(); }
  QueuedCalls(const QueuedCalls&) = delete;
  QueuedCalls& operator=(const QueuedCalls&) = delete;

  [[nodiscard]] grpc::ServerCompletionQueue& queue() { return *queue_; }
  void Serve() {
    thread_ = std::thread([this] { Run(); });
  }
  // Whether the thread has not polled for so long, because an event takes it or it has ended.
  // Threads: any.
  [[nodiscard]] bool BusyFor(std::chrono::nanoseconds time) const {
    const int64_t since = busy_since_.load(std::memory_order_relaxed);
    return since != kPolls && Now() - since >= time.count();
  }
  // REQUIRES: the server's Shutdown() has returned, so that no call is left.
  void Stop() {
    if (std::exchange(stopped_, true)) return;
    queue_->Shutdown();
    if (thread_.joinable()) thread_.join();
  }

 private:
  static constexpr int64_t kPolls = -1;
  static int64_t Now() {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  void Run() {
    using Queue = grpc::CompletionQueue;
    constexpr int kWithoutPause = 64;
    void* tag = nullptr;
    bool ok = false;
    for (int events = 0;; ++events) {
      // A time in the past: what is there, without a wait.
      Queue::NextStatus next = events == kWithoutPause
                                   ? Queue::TIMEOUT
                                   : queue_->AsyncNext(&tag, &ok, gpr_inf_past(GPR_CLOCK_REALTIME));
      if (next == Queue::TIMEOUT) {
        pause_();
        events = 0;
        busy_since_.store(kPolls, std::memory_order_relaxed);
        next = queue_->Next(&tag, &ok) ? Queue::GOT_EVENT : Queue::SHUTDOWN;
        busy_since_.store(Now(), std::memory_order_relaxed);
      }
      if (next == Queue::SHUTDOWN) return;
      const auto* event = static_cast<const QueuedCall::Event*>(tag);
      (event->call->*event->on)(ok);
    }
  }

  const std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  const std::function<void()> pause_;
  std::atomic<int64_t> busy_since_{0};  // of the steady clock, ns; kPolls: it polls
  std::thread thread_;
  bool stopped_ = false;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_QUEUED_CALLS_H_
