// A daemon of one trainer that computes nothing: real sockets and shared memory. What the client
// does when a daemon goes, or sets the job back, is tested with it at any point; a whole group that
// does so is in the tests with real ones.
//
//   FakeDaemon daemon(path, {});
//   … trainer steps …
//   daemon.GoBackTo(1, "position 1");          // the trainer's calls say so until it acknowledges
//   daemon.Die();
//   FakeDaemon successor(path, {.step = 3});   // as one that has found a snapshot of step 3
//
// The weights of step n are n, in every element.
//
// Threads: any; one trainer at a time.
#ifndef DMUOND_TESTS_CLIENT_FAKE_DAEMON_H_
#define DMUOND_TESTS_CLIENT_FAKE_DAEMON_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dmuond/v1/trainer.pb.h"

namespace dmuond::testing {

class FakeDaemon {
 public:
  struct State {
    int64_t step = 0;  // 0: none
    std::string trainer_state;
    uint64_t epoch = 1;
    int64_t published_timeout_ms = 0;  // promised at OpenSession; 0: nothing is
    uint32_t version = 2;              // of the protocol
    int late_claims = 0;               // OpenSession calls that come too late
  };
  FakeDaemon(const std::string& path, State state);
  ~FakeDaemon();
  FakeDaemon(const FakeDaemon&) = delete;
  FakeDaemon& operator=(const FakeDaemon&) = delete;

  // As if killed: every socket closes.
  void Die();
  // `asked`: as if somebody had loaded a snapshot; else another daemon's memory is lost.
  void GoBackTo(int64_t step, const std::string& trainer_state, bool asked = true);
  // All lanes are new, and nothing is lost: the masters are published under the new epoch.
  void BeginEpoch();
  // The next submit is aborted by a new epoch, or the next push is.
  void AbortNextSubmit();
  void AbortNextPush();
  // Steps are decided and the job goes back, and no weights come.
  void HoldPublishing(bool hold);
  // The next OpenSession, RegisterLayout or SubmitStep is refused: the daemon is leaving.
  void RefuseAsDraining();

  [[nodiscard]] std::vector<v1::SubmitStepRequest> submits() const;
  [[nodiscard]] std::vector<int64_t> acknowledged() const;
  [[nodiscard]] std::vector<uint64_t> loads() const;   // LoadSnapshotRequest.call
  [[nodiscard]] std::vector<float> pushed() const;     // the weights of the last push
  [[nodiscard]] std::vector<float> gradients() const;  // as of now
  [[nodiscard]] int opens() const;                     // OpenSession calls
  [[nodiscard]] int closes() const;                    // CloseSession calls

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_CLIENT_FAKE_DAEMON_H_
