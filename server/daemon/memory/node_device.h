// The devices of a node's lanes, as its daemon sees them. All that depends on the type of device in
// a daemon is decided here. The daemon computes nothing itself, and opens no device.
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
  // The type's name for daemons, trainers and people: "cpu".
  [[nodiscard]] virtual std::string type() const = 0;
  // The value of --device for a lane's program. Called when the lane is about to be started.
  [[nodiscard]] virtual std::string OfLane(scheduler::LaneIndex lane) const = 0;
  // Variables of the program's environment, beside the daemon's own or in place of them.
  using Variables = std::vector<std::pair<std::string, std::string>>;
  [[nodiscard]] virtual Variables OfLaneEnvironment() const = 0;
  // Makes and checks what lanes map.
  [[nodiscard]] virtual kernels::MemoryHolder& memory() = 0;
  // Why lanes cannot map an arena of a trainer's own memory; OK: they can. INVALID_ARGUMENT
  // (ARENA_INVALID), naming arena and rank.
  [[nodiscard]] virtual absl::Status CheckArena(int32_t rank, const v1::Arena& arena) const = 0;
};

// The value of --devices: how many lanes of which type.
struct DeviceList {
  std::string type;
  int32_t lanes = 1;
};
// INVALID_ARGUMENT says what is wrong, to be read after the flag and its value.
[[nodiscard]] absl::StatusOr<DeviceList> ParseDevices(absl::string_view devices, int32_t lanes_max);

// Lanes on the processor, each with so many threads.
[[nodiscard]] std::unique_ptr<NodeDevice> MakeCpuNodeDevice(int32_t threads);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_MEMORY_NODE_DEVICE_H_
