// Decides when to tell people who keeps a step waiting: after 5 s, then less and less often.
// Threads: one caller.
#ifndef DMUOND_CLIENT_CPP_SRC_WAIT_NOTICE_H_
#define DMUOND_CLIENT_CPP_SRC_WAIT_NOTICE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "dmuond/v1/trainer.pb.h"

namespace dmuond::client {

// One step, from its first submission on, whatever its attempts come to.
class WaitNotice {
 public:
  using Clock = std::chrono::steady_clock;

  WaitNotice(int32_t rank, int64_t step, Clock::time_point now = Clock::now())
      : rank_(rank), step_(step), began_(now) {}
  [[nodiscard]] int64_t step() const { return step_; }

  // How long a call may wait before it is time to look who is awaited.
  [[nodiscard]] std::chrono::milliseconds Left(Clock::time_point now = Clock::now()) const;
  // What the daemon has said, at whatever time. What to tell people; empty: nothing yet.
  [[nodiscard]] std::string Hear(const v1::WaitStepReply& reply,
                                 Clock::time_point now = Clock::now());
  // The step is decided.
  [[nodiscard]] std::string End(Clock::time_point now = Clock::now()) const;

 private:
  [[nodiscard]] std::chrono::seconds Due() const;

  const int32_t rank_;
  const int64_t step_;
  const Clock::time_point began_;
  size_t told_ = 0;  // times that are over
};

}  // namespace dmuond::client

#endif  // DMUOND_CLIENT_CPP_SRC_WAIT_NOTICE_H_
