// Servers whose connections another server's thread reads. All of gRPC's descriptors in a process
// are in one epoll set, and threads that poll it wake each other for everything that comes: with a
// second such thread a step of two trainers took a fifth longer. So QueuedCalls' thread polls for
// all servers of the daemon's sockets, as long as it does. While it is busy, waits for the daemon's
// lock or has ended, a thread of this class polls in its place: what the others are asked, and
// pings, are answered a moment later, whatever holds the lock.
//
//   StandIn stand_in(calls);
//   stand_in.PollFor(builder);  // of each of the other servers, before BuildAndStart()
//   stand_in.Serve();
//   … every server's Shutdown() …
//   stand_in.Stop();
#ifndef DMUOND_SERVER_DAEMON_CALLS_STAND_IN_H_
#define DMUOND_SERVER_DAEMON_CALLS_STAND_IN_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "server/daemon/calls/queued_calls.h"

namespace dmuond::server {

class StandIn {
 public:
  // `calls` must outlive the object.
  explicit StandIn(const QueuedCalls& calls) : calls_(calls) {}
  ~StandIn() { Stop(); }
  StandIn(const StandIn&) = delete;
  StandIn& operator=(const StandIn&) = delete;

  // The server's threads will wait for requests without polling: so gRPC has it for a server with a
  // completion queue of its user's, through which nothing comes here.
  void PollFor(grpc::ServerBuilder& builder) { queues_.push_back(builder.AddCompletionQueue()); }
  // REQUIRES: every server is built.
  void Serve() {
    thread_ = std::thread([this] { Run(); });
  }
  // REQUIRES: the Shutdown() of every server has returned.
  void Stop() {
    {
      MutexLock lock(mutex_);
      if (stop_) return;
      stop_ = true;
      changed_.NotifyAll();
    }
    if (thread_.joinable()) thread_.join();
    for (const auto& queue : queues_) {
      queue->Shutdown();
      void* tag = nullptr;
      bool ok = false;
      while (queue->Next(&tag, &ok)) {
      }
    }
  }

 private:
  static constexpr std::chrono::milliseconds kBusy{100};  // so long, and it needs a stand-in

  void Run() {
    while (!WaitStopped()) {
      while (calls_.BusyFor(kBusy) && !stopped()) {
        void* tag = nullptr;
        bool ok = false;
        queues_.front()->AsyncNext(&tag, &ok, std::chrono::system_clock::now() + kBusy);
      }
    }
  }
  bool WaitStopped() {
    MutexLock lock(mutex_);
    const auto until = std::chrono::steady_clock::now() + kBusy;
    while (!stop_ && changed_.WaitUntil(mutex_, until)) {
    }
    return stop_;
  }
  bool stopped() {
    MutexLock lock(mutex_);
    return stop_;
  }

  const QueuedCalls& calls_;
  std::vector<std::unique_ptr<grpc::ServerCompletionQueue>> queues_;
  std::thread thread_;
  Mutex mutex_;
  CondVar changed_;
  bool stop_ DMUOND_GUARDED_BY(mutex_) = false;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_STAND_IN_H_
