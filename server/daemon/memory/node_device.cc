#include "server/daemon/memory/node_device.h"

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/cpu/core_type.h"
#include "kernels/cpu/cpu_memory.h"
#include "server/common/errors.h"

namespace dmuond::server {
namespace {

constexpr char kCpu[] = "cpu";
constexpr size_t kCudaIpcHandleBytes = 64;

class CpuNodeDevice : public NodeDevice {
 public:
  CpuNodeDevice(int32_t threads, std::unique_ptr<kernels::MemoryHolder> memory)
      : threads_(threads), memory_(std::move(memory)) {}

  std::string type() const override { return kCpu; }
  std::string OfLane(scheduler::LaneIndex /*lane*/) const override {
    return absl::StrCat(kCpu, ":", threads_);
  }
  // OpenBLAS reads both when it is loaded. A core type that the user has set stands.
  Variables OfLaneEnvironment() const override {
    Variables variables = {{"OPENBLAS_NUM_THREADS", "1"}};
    const std::string core_type = kernels::cpu::LaneCoreType();
    if (!core_type.empty()) variables.emplace_back(kernels::cpu::kCoreTypeVariable, core_type);
    return variables;
  }
  kernels::MemoryHolder& memory(scheduler::LaneIndex /*lane*/) override { return *memory_; }
  absl::StatusOr<kernels::MemoryHolder*> ArenaMemory(int32_t rank,
                                                     const std::string& uuid) override {
    if (uuid.empty()) return memory_.get();
    return Error(absl::StatusCode::kInvalidArgument, "DEVICE_UNKNOWN",
                 Say("rank ", Named("rank", rank), " computes on device ", Named("device", uuid),
                     ", but the lanes of this daemon run on the CPU (--devices)"));
  }
  absl::Status CheckArena(int32_t rank, const v1::Arena& arena) const override {
    if (!arena.has_cuda_ipc()) return absl::OkStatus();
    const size_t length = arena.cuda_ipc().handle().size();
    if (length != kCudaIpcHandleBytes) {
      return Error(
          absl::StatusCode::kInvalidArgument, "ARENA_INVALID",
          Say("arena ", Named("arena", arena.id()), " of rank ", Named("rank", rank),
              ": a CUDA IPC handle has ", Named("handle_bytes_wanted", kCudaIpcHandleBytes),
              " bytes, this one ", Named("handle_bytes", length)));
    }
    return Error(absl::StatusCode::kInvalidArgument, "ARENA_INVALID",
                 Say("arena ", Named("arena", arena.id()), " of rank ", Named("rank", rank),
                     " is a CUDA IPC handle, but this daemon's device is the CPU"));
  }

 private:
  const int32_t threads_;
  const std::unique_ptr<kernels::MemoryHolder> memory_;
};

}  // namespace

absl::StatusOr<DeviceList> ParseDevices(absl::string_view devices, int32_t lanes_max) {
  DeviceList list{.type = kCpu};
  if (!absl::ConsumePrefix(&devices, absl::StrCat(kCpu, ":")) ||
      !absl::SimpleAtoi(devices, &list.lanes) || list.lanes < 1 || list.lanes > lanes_max) {
    return absl::InvalidArgumentError(
        absl::StrCat("is not ", kCpu, ":N with N between 1 and ", lanes_max));
  }
  return list;
}

std::unique_ptr<NodeDevice> MakeCpuNodeDevice(int32_t threads,
                                              std::unique_ptr<kernels::MemoryHolder> memory) {
  if (memory == nullptr) memory = std::make_unique<kernels::cpu::CpuMemoryHolder>();
  return std::make_unique<CpuNodeDevice>(threads, std::move(memory));
}

}  // namespace dmuond::server
