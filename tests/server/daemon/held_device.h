// A node's processor, whose memory takes as long as a test wants, and whose lanes' starts a test
// sees.
#ifndef DMUOND_TESTS_SERVER_DAEMON_HELD_DEVICE_H_
#define DMUOND_TESTS_SERVER_DAEMON_HELD_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "base/unique_fd.h"
#include "dmuond/v1/trainer.pb.h"
#include "kernels/cpu/cpu_memory.h"
#include "kernels/device.h"
#include "scheduler/cost_model.h"
#include "scheduler/types.h"
#include "server/daemon/memory/node_device.h"

namespace dmuond::server {

// Memory that takes as long as a test wants.
class HeldMemory final : public kernels::MemoryHolder {
 public:
  absl::StatusOr<wire::UniqueFd> Allocate(size_t bytes, const std::string& name) override {
    {
      MutexLock lock(mutex_);
      ++waiting_;
      changed_.NotifyAll();
      while (held_) changed_.Wait(mutex_);
      --waiting_;
    }
    return memory_.Allocate(bytes, name);
  }
  absl::Status Check(int fd, size_t bytes) override { return memory_.Check(fd, bytes); }

  void Hold() {
    MutexLock lock(mutex_);
    held_ = true;
  }
  void Release() {
    MutexLock lock(mutex_);
    held_ = false;
    changed_.NotifyAll();
  }
  // Until somebody waits for memory.
  void WaitUntilHeld() {
    MutexLock lock(mutex_);
    while (waiting_ == 0) changed_.Wait(mutex_);
  }

 private:
  kernels::cpu::CpuMemoryHolder memory_;
  Mutex mutex_;
  CondVar changed_;
  bool held_ DMUOND_GUARDED_BY(mutex_) = false;
  int waiting_ DMUOND_GUARDED_BY(mutex_) = 0;
};

// The processor, with such memory.
class HeldDevice : public NodeDevice {
 public:
  std::string type() const override { return cpu_->type(); }
  std::string OfLane(scheduler::LaneIndex lane) const override {
    if (starts_) starts_(lane);
    return cpu_->OfLane(lane);
  }
  Variables OfLaneEnvironment() const override { return cpu_->OfLaneEnvironment(); }
  bool TriesLanes() const override { return cpu_->TriesLanes(); }
  scheduler::CostTable Estimates() const override { return cpu_->Estimates(); }
  bool StateIsHostMemory() const override { return cpu_->StateIsHostMemory(); }
  std::optional<scheduler::LaneIndex> LaneOf(const std::string& uuid) const override {
    return cpu_->LaneOf(uuid);
  }
  kernels::MemoryHolder& memory(scheduler::LaneIndex lane) override { return cpu_->memory(lane); }
  absl::StatusOr<kernels::MemoryHolder*> ArenaMemory(int32_t rank,
                                                     const std::string& uuid) override {
    return cpu_->ArenaMemory(rank, uuid);
  }
  HeldMemory& held() { return held_; }
  absl::Status CheckArena(int32_t rank, const std::string& uuid,
                          const v1::Arena& arena) const override {
    return cpu_->CheckArena(rank, uuid, arena);
  }
  // `starts` is called when a lane is about to be started, under the daemon's lock. Before any is.
  void Watch(std::function<void(scheduler::LaneIndex)> starts) { starts_ = std::move(starts); }

 private:
  HeldMemory& held_ = *new HeldMemory();  // cpu_ owns it
  const std::unique_ptr<NodeDevice> cpu_ =
      MakeCpuNodeDevice(/*threads=*/1, std::unique_ptr<kernels::MemoryHolder>(&held_));
  std::function<void(scheduler::LaneIndex)> starts_;
};

}  // namespace dmuond::server

#endif  // DMUOND_TESTS_SERVER_DAEMON_HELD_DEVICE_H_
