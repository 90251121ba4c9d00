// The devices of a node's lanes, as its daemon sees them: whatever differs between types of devices
// in a daemon is decided here. The daemon itself computes nothing, and opens no device.
#ifndef DMUOND_SERVER_DAEMON_MEMORY_NODE_DEVICE_H_
#define DMUOND_SERVER_DAEMON_MEMORY_NODE_DEVICE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dmuond/v1/trainer.pb.h"
#include "kernels/device.h"
#include "scheduler/types.h"

namespace dmuond::server {

// Threads: any.
class NodeDevice {
 public:
  virtual ~NodeDevice() = default;
  // As daemons, trainers and people are told: "cpu".
  [[nodiscard]] virtual std::string type() const = 0;
  // --device of a lane's program.
  [[nodiscard]] virtual std::string OfLane(scheduler::LaneIndex lane) const = 0;
  // What the program's environment has beside the daemon's own, or in place of it.
  using Variables = std::vector<std::pair<std::string, std::string>>;
  [[nodiscard]] virtual Variables OfLaneEnvironment() const = 0;
  // Makes what the lane keeps on its device.
  [[nodiscard]] virtual kernels::MemoryHolder& memory(scheduler::LaneIndex lane) = 0;
  // Makes the arenas of a trainer, on the device that it computes with; `uuid`: as OpenSession has
  // it. INVALID_ARGUMENT (DEVICE_UNKNOWN), naming rank and device: no lane of this node could reach
  // them.
  [[nodiscard]] virtual absl::StatusOr<kernels::MemoryHolder*> ArenaMemory(
      int32_t rank, const std::string& uuid) = 0;
  // Why lanes cannot map an arena of a trainer's own memory; OK: they can. INVALID_ARGUMENT
  // (ARENA_INVALID), naming arena and rank.
  [[nodiscard]] virtual absl::Status CheckArena(int32_t rank, const v1::Arena& arena) const = 0;
};

// What --devices says: lanes of a type.
struct DeviceList {
  std::string type;
  int32_t lanes = 1;
};
// INVALID_ARGUMENT: what is wrong, for a sentence that begins with the flag and its value.
[[nodiscard]] absl::StatusOr<DeviceList> ParseDevices(absl::string_view devices, int32_t lanes_max);

// Lanes on the processor. `threads`: of each lane. `memory` makes the memory of lanes and trainers;
// null: memfds.
[[nodiscard]] std::unique_ptr<NodeDevice> MakeCpuNodeDevice(
    int32_t threads, std::unique_ptr<kernels::MemoryHolder> memory = nullptr);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_MEMORY_NODE_DEVICE_H_
