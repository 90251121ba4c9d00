// A trainer made of the protocol alone: every request by hand, with whatever in it, and a timeline
// that says what the test wants it to. How its calls reach a daemon, a subclass says.
//
// Threads: calls from any; the rest one at a time.
#ifndef DMUOND_TESTS_SERVER_PROTOCOL_TRAINER_H_
#define DMUOND_TESTS_SERVER_PROTOCOL_TRAINER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "base/unique_fd.h"
#include "dmuond/v1/trainer.pb.h"
#include "dmuond/wire/timeline.h"
#include "kernels/device.h"

namespace dmuond::testing {

class ProtocolTrainer {
 public:
  // Connects the attach socket of the daemon at `address` and has a nonce. Failures are the test's.
  explicit ProtocolTrainer(const std::string& address);
  virtual ~ProtocolTrainer() = default;
  ProtocolTrainer(const ProtocolTrainer&) = delete;
  ProtocolTrainer& operator=(const ProtocolTrainer&) = delete;

  // ---- calls ----
  virtual absl::Status Call(const v1::OpenSessionRequest& request, v1::OpenSessionReply* reply) = 0;
  virtual absl::Status Call(const v1::RegisterLayoutRequest& request,
                            v1::RegisterLayoutReply* reply) = 0;
  virtual absl::Status Call(const v1::AttachBuffersRequest& request,
                            v1::AttachBuffersReply* reply) = 0;
  virtual absl::Status Call(const v1::PushParametersRequest& request,
                            v1::PushParametersReply* reply) = 0;
  virtual absl::Status Call(const v1::SubmitStepRequest& request, v1::SubmitStepReply* reply) = 0;
  virtual absl::Status Call(const v1::CloseSessionRequest& request,
                            v1::CloseSessionReply* reply) = 0;

  // ---- requests that are right: tests change one thing ----
  [[nodiscard]] v1::OpenSessionRequest OpenRequest(int32_t rank = 0, int32_t world = 1) const;
  // One 8 x 16 matrix "matrix", replicated: gradient in arena 1, weight in arena 2.
  [[nodiscard]] v1::RegisterLayoutRequest LayoutRequest() const;
  [[nodiscard]] v1::AttachBuffersRequest AttachRequest() const;
  [[nodiscard]] v1::SubmitStepRequest SubmitRequest(int64_t step) const;

  // ---- the life of a trainer, by these requests ----
  absl::Status Open(int32_t rank = 0, int32_t world = 1);
  absl::Status Register();
  absl::Status Attach();  // maps arenas and timeline
  absl::Status Push(int64_t step = 0);
  absl::Status Submit(const v1::SubmitStepRequest& request, v1::SubmitStepReply* reply);
  // Signals its bucket and submits: committed, or what came instead.
  absl::Status Step(int64_t step);
  absl::Status Close();

  // Of sessions that are opened from now on.
  void set_job(std::string job) { job_ = std::move(job); }
  // The device of sessions that are opened from now on; none without it.
  void set_device_uuid(std::string uuid) { device_uuid_ = std::move(uuid); }
  [[nodiscard]] v1::SessionKey& key() { return key_; }
  [[nodiscard]] uint64_t attempt() const { return attempt_; }
  void set_attempt(uint64_t attempt) { attempt_ = attempt; }
  [[nodiscard]] const wire::UniqueFd& arena(int index) const { return arenas_[index]; }
  [[nodiscard]] float* weights() const;
  [[nodiscard]] wire::TimelinePage page() const { return wire::TimelinePage(timeline_->data()); }
  // The next frame of the attach socket is there already, or comes within 50 ms.
  [[nodiscard]] bool HasFrame() const;
  // One packet on the attach socket, on which trainers have nothing to say.
  void Say(const std::string& bytes) const;
  // Waits until the daemon has closed the attach socket.
  [[nodiscard]] bool AttachSocketEnds() const;

 private:
  wire::UniqueFd socket_;
  std::string job_ = "raw";
  std::string nonce_;
  std::string device_uuid_;
  v1::SessionKey key_;
  uint64_t attempt_ = 0;
  wire::UniqueFd arenas_[2];
  std::unique_ptr<kernels::Mapping> gradient_;
  std::unique_ptr<kernels::Mapping> weight_;
  std::unique_ptr<kernels::Mapping> timeline_;
};

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_SERVER_PROTOCOL_TRAINER_H_
