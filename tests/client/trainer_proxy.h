// A Trainer service between one trainer and its daemon that does to each call what a schedule says:
// sends it twice, late, again after later ones, or not at all; loses its answer; cuts the
// connection. What the daemon says to a call that was sent twice at once must be the same twice.
//
//   TrainerProxy proxy(daemon.address(), schedule);
//   Session::Open({.address = proxy.address(), …});
//   EXPECT_THAT(proxy.complaints(), IsEmpty());
//
// Threads: any.
#ifndef DMUOND_TESTS_CLIENT_TRAINER_PROXY_H_
#define DMUOND_TESTS_CLIENT_TRAINER_PROXY_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dmuond/v1/trainer.pb.h"

namespace dmuond::testing {

enum class Fault : uint8_t {
  kNone,
  kTwiceAtOnce,     // two copies; the trainer gets one answer
  kAgainLater,      // a second copy arrives after the trainer's next call
  kAgainMuchLater,  // a second copy arrives after the trainer's fourth next call
  kDelay,           // others' calls overtake it
  kLoseRequest,     // never arrives; the trainer sees a broken connection
  kLoseReply,       // takes effect; the trainer sees a broken connection
  kCut,             // the connection ends while the daemon works on it
};
inline constexpr Fault kAllFaults[] = {
    Fault::kTwiceAtOnce, Fault::kAgainLater,  Fault::kAgainMuchLater,
    Fault::kDelay,       Fault::kLoseRequest, Fault::kLoseReply,
    Fault::kCut};
[[nodiscard]] const char* Name(Fault fault);

class TrainerProxy {
 public:
  // For the `call`-th call (from 0, repeated ones count) of a method, "SubmitStep" say.
  using Schedule = std::function<Fault(const std::string& method, int call)>;

  TrainerProxy(const std::string& daemon, Schedule schedule);
  ~TrainerProxy();
  TrainerProxy(const TrainerProxy&) = delete;
  TrainerProxy& operator=(const TrainerProxy&) = delete;

  [[nodiscard]] std::string address() const;
  // Of the trainer's session, once it is open.
  [[nodiscard]] v1::SessionKey key() const;
  // Two copies of a call that were answered differently.
  [[nodiscard]] std::vector<std::string> complaints() const;
  // How often each fault befell each method, "SubmitStep" say.
  [[nodiscard]] std::map<std::pair<std::string, Fault>, int> done() const;

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_CLIENT_TRAINER_PROXY_H_
