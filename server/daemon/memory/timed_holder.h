// Memory of a device whose driver may hang: a call that does not come back is given up, and fails
// with the device's name. Who waits for memory, and the daemon, go on.
#ifndef DMUOND_SERVER_DAEMON_MEMORY_TIMED_HOLDER_H_
#define DMUOND_SERVER_DAEMON_MEMORY_TIMED_HOLDER_H_

#include <atomic>
#include <chrono>
#include <memory>
#include <string>

#include "kernels/device.h"

namespace dmuond::server {

// Threads: any.
class TimedHolder final : public kernels::MemoryHolder {
 public:
  // `device`: for people. `timeout`: of one call; 0: it may take for ever. Time in which this
  // process does not run does not count.
  TimedHolder(std::string device, std::shared_ptr<kernels::MemoryHolder> holder,
              std::chrono::milliseconds timeout);

  // As the holder's. DEADLINE_EXCEEDED (DEVICE_HANGS): it has not come back in time, or an earlier
  // call has not yet. What comes late is given back.
  absl::StatusOr<wire::UniqueFd> Allocate(size_t bytes, const std::string& name) override;
  [[nodiscard]] size_t Rounded(size_t bytes) const override { return holder_->Rounded(bytes); }
  absl::Status Check(int fd, size_t bytes) override { return holder_->Check(fd, bytes); }
  // Calls that were given up and have not come back: the process cannot end in order.
  [[nodiscard]] bool hangs() const { return *hanging_ > 0; }

 private:
  struct Call;
  [[nodiscard]] absl::Status Hangs(size_t bytes, const std::string& name) const;

  const std::string device_;
  const std::shared_ptr<kernels::MemoryHolder> holder_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<std::atomic<int>> hanging_ = std::make_shared<std::atomic<int>>(0);
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_MEMORY_TIMED_HOLDER_H_
