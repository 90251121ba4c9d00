#include "server/daemon/memory/node_device.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kernels/cpu/core_type.h"
#include "kernels/cpu/cpu_memory.h"
#include "server/common/errors.h"
#ifdef DMUOND_CUDA_MEMORY
#include "server/daemon/memory/cuda_node_device.h"
#endif

namespace dmuond::server {
namespace {

constexpr char kCpu[] = "cpu";
constexpr char kCuda[] = "cuda";
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
    const std::string core_type = CoreType();
    if (!core_type.empty()) variables.emplace_back(kernels::cpu::kCoreTypeVariable, core_type);
    return variables;
  }
  bool TriesLanes() const override { return false; }
  std::string CoreType() const override { return kernels::cpu::LaneCoreType(); }
  scheduler::CostTable Estimates() const override { return scheduler::CpuCosts(threads_); }
  bool StateIsHostMemory() const override { return true; }
  std::optional<scheduler::LaneIndex> LaneOf(const std::string& /*uuid*/) const override {
    return std::nullopt;
  }
  kernels::MemoryHolder& memory(scheduler::LaneIndex /*lane*/) override { return *memory_; }
  absl::StatusOr<kernels::MemoryHolder*> ArenaMemory(int32_t rank,
                                                     const std::string& uuid) override {
    if (uuid.empty()) return memory_.get();
    return Error(absl::StatusCode::kInvalidArgument, "DEVICE_UNKNOWN",
                 Say("rank ", Named("rank", rank), " computes on device ", Named("device", uuid),
                     ", but the lanes of this daemon run on the CPU (--devices)"));
  }
  absl::Status CheckArena(int32_t rank, const std::string& /*uuid*/,
                          const v1::Arena& arena) const override {
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
  DeviceList list;
  absl::string_view rest = devices;
  if (absl::ConsumePrefix(&rest, absl::StrCat(kCpu, ":"))) {
    list.type = kCpu;
  } else if (absl::ConsumePrefix(&rest, absl::StrCat(kCuda, ":"))) {
    list.type = kCuda;
  }
  const bool listed = list.type == kCuda && absl::StrContains(rest, ',');
  for (const absl::string_view text : absl::StrSplit(rest, ',')) {
    int32_t number = -1;
    if (list.type.empty() || !absl::SimpleAtoi(text, &number) || number < 0 ||
        (!listed && (number < 1 || number > lanes_max || text.size() != rest.size()))) {
      return absl::InvalidArgumentError(
          absl::StrCat("is not ", kCpu, ":N or ", kCuda, ":N with N between 1 and ", lanes_max,
                       ", nor ", kCuda, ": and a list of devices, as in ", kCuda, ":0,2"));
    }
    list.lanes = number;
    if (!listed) break;
    if (std::find(list.ordinals.begin(), list.ordinals.end(), number) != list.ordinals.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("names device ", number, " twice: a device has one lane"));
    }
    list.ordinals.push_back(number);
    list.lanes = static_cast<int32_t>(list.ordinals.size());
  }
  if (list.lanes > lanes_max) {
    return absl::InvalidArgumentError(
        absl::StrCat("names ", list.lanes, " devices, at most ", lanes_max, " are possible"));
  }
  for (int32_t i = 0; list.type == kCuda && !listed && i < list.lanes; ++i) {
    list.ordinals.push_back(i);
  }
  return list;
}

absl::StatusOr<std::unique_ptr<NodeDevice>> OpenNodeDevice(const DeviceList& list,
                                                           const NodeDeviceOptions& options) {
  if (list.type == kCpu) return MakeCpuNodeDevice(options.threads);
#ifdef DMUOND_CUDA_MEMORY
  return OpenCudaNodeDevice(list, options);
#else
  return absl::UnimplementedError("this dmuond was built without CUDA");
#endif
}

std::unique_ptr<NodeDevice> MakeCpuNodeDevice(int32_t threads,
                                              std::unique_ptr<kernels::MemoryHolder> memory) {
  if (memory == nullptr) memory = std::make_unique<kernels::cpu::CpuMemoryHolder>();
  return std::make_unique<CpuNodeDevice>(threads, std::move(memory));
}

}  // namespace dmuond::server
