// Watches a session until it ends, from a thread of its own; whatever cuts the stream, it watches
// again.
//
//   SessionWatcher watcher(address, key);
//   … trainer steps …
//   EXPECT_TRUE(watcher.HearsOf(step));
//
// Threads: any.
#ifndef DMUOND_TESTS_CLIENT_SESSION_WATCHER_H_
#define DMUOND_TESTS_CLIENT_SESSION_WATCHER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "base/mutex.h"
#include "dmuond/v1/trainer.grpc.pb.h"
#include "grpcpp/grpcpp.h"

namespace dmuond::testing {

class SessionWatcher {
 public:
  SessionWatcher(const std::string& address, v1::SessionKey key);
  ~SessionWatcher();
  SessionWatcher(const SessionWatcher&) = delete;
  SessionWatcher& operator=(const SessionWatcher&) = delete;

  // Within half a minute it has heard, or hears, that a step was committed under an attempt.
  [[nodiscard]] bool HearsOf(int64_t step, uint64_t attempt);

 private:
  void Run();

  const std::unique_ptr<v1::Trainer::Stub> stub_;
  const v1::SessionKey key_;
  Mutex mutex_;
  CondVar changed_;
  grpc::ClientContext* watching_ DMUOND_GUARDED_BY(mutex_) = nullptr;
  bool ends_ DMUOND_GUARDED_BY(mutex_) = false;
  v1::Outcome newest_ DMUOND_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_CLIENT_SESSION_WATCHER_H_
