// The devices of a node's lanes, as its daemon sees them. All that depends on the type of device in
// a daemon is decided here. The daemon computes nothing itself, and opens no device.
#ifndef DMUOND_SERVER_DAEMON_MEMORY_NODE_DEVICE_H_
#define DMUOND_SERVER_DAEMON_MEMORY_NODE_DEVICE_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dmuond/v1/trainer.pb.h"
#include "kernels/device.h"
#include "scheduler/cost_model.h"
#include "scheduler/types.h"

namespace dmuond::server {

// Threads: any.
class NodeDevice {
 public:
  virtual ~NodeDevice() = default;
  // The type's name for daemons, trainers and people: "cpu", "cuda".
  [[nodiscard]] virtual std::string type() const = 0;
  // The value of --device for a lane's program. Called when the lane is about to be started.
  [[nodiscard]] virtual std::string OfLane(scheduler::LaneIndex lane) const = 0;
  // Whether a call of its driver does not come back, so that the process cannot end in order.
  [[nodiscard]] virtual bool Hangs() const { return false; }
  // Of lanes' devices that have uuids: no other daemon has a lane there.
  [[nodiscard]] virtual std::vector<std::string> Uuids() const { return {}; }
  // How long a lane whose work is over may take to let go of it. Its process, which takes long to
  // begin, then gets the next work; one that takes longer is killed. nullopt: lanes are killed at
  // once, because their processes begin fast.
  [[nodiscard]] virtual std::optional<std::chrono::milliseconds> ReleasesLanesWithin() const {
    return std::nullopt;
  }
  // The processors of this machine that are near the lane's device, as the kernel lists them:
  // "0-15,32-47". Empty: it is not known, or they are the device.
  [[nodiscard]] virtual std::string ProcessorsNear(scheduler::LaneIndex /*lane*/) const {
    return "";
  }
  // Variables of the program's environment, beside the daemon's own or in place of them. An empty
  // value: the variable is not in it.
  using Variables = std::vector<std::pair<std::string, std::string>>;
  [[nodiscard]] virtual Variables OfLaneEnvironment() const = 0;
  // Whether a lane's program may find that it cannot run on its device: it is tried before the
  // daemon serves.
  [[nodiscard]] virtual bool TriesLanes() const = 0;
  // OpenBLAS's core type, which lanes have; empty: its own choice, or they do not compute with it.
  [[nodiscard]] virtual std::string CoreType() const { return ""; }
  // What updates take on such devices, roughly: for plans without a table of measured times.
  [[nodiscard]] virtual scheduler::CostTable Estimates() const = 0;
  // Gradients of other devices may take so much of a lane's memory (PlanInputs::landing_bytes_max).
  [[nodiscard]] virtual int64_t LandingBytesMax() const { return 0; }
  // Lanes' memory is given in multiples of it.
  [[nodiscard]] virtual int64_t GranuleBytes() const { return 1; }
  // Whether the state of lanes lies in host memory, so that a snapshot copies it straight.
  [[nodiscard]] virtual bool StateIsHostMemory() const = 0;
  // The lane of a trainer's device; nullopt: it has none.
  [[nodiscard]] virtual std::optional<scheduler::LaneIndex> LaneOf(
      const std::string& uuid) const = 0;
  // Makes what the lane keeps on its device.
  [[nodiscard]] virtual kernels::MemoryHolder& memory(scheduler::LaneIndex lane) = 0;
  // Makes the arenas of a trainer, on the device that it computes with; `uuid`: as OpenSession has
  // it. INVALID_ARGUMENT (DEVICE_UNKNOWN), naming rank and device: no lane of this node could reach
  // them.
  [[nodiscard]] virtual absl::StatusOr<kernels::MemoryHolder*> ArenaMemory(
      int32_t rank, const std::string& uuid) = 0;
  // Why lanes cannot map an arena of a trainer's own memory; OK: they can, or it is none. `uuid`:
  // of the device that the trainer computes with. INVALID_ARGUMENT (ARENA_INVALID), naming arena
  // and rank.
  [[nodiscard]] virtual absl::Status CheckArena(int32_t rank, const std::string& uuid,
                                                const v1::Arena& arena) const = 0;
};

// The value of --devices: how many lanes of which type.
struct DeviceList {
  std::string type;
  int32_t lanes = 1;
  std::vector<int32_t> ordinals;  // "cuda": the device of each lane
};
// INVALID_ARGUMENT says what is wrong, to be read after the flag and its value.
[[nodiscard]] absl::StatusOr<DeviceList> ParseDevices(absl::string_view devices, int32_t lanes_max);

struct NodeDeviceOptions {
  int32_t threads = 1;        // of each lane on the processor
  bool lanes_use_mps = true;  // where the environment has it
  std::string mps_folder;     // of a control daemon that they use instead; empty: none
  // Of one call to a driver that makes memory; 0: none.
  std::chrono::milliseconds memory_timeout{0};
  std::string no_mps_folder;                         // on GPUs: where an empty folder is made
  std::string pci_devices = "/sys/bus/pci/devices";  // on GPUs: what the kernel says of them
  std::string rail_address;  // a name or number of this host; empty: one node, without rails
};
// UNIMPLEMENTED: this daemon was built without such devices. Other errors name the device that
// cannot be opened, or used, and why.
[[nodiscard]] absl::StatusOr<std::unique_ptr<NodeDevice>> OpenNodeDevice(
    const DeviceList& list, const NodeDeviceOptions& options);

// Lanes on the processor, each with so many threads. `memory` makes the memory of lanes and
// trainers; null: memfds.
[[nodiscard]] std::unique_ptr<NodeDevice> MakeCpuNodeDevice(
    int32_t threads, std::unique_ptr<kernels::MemoryHolder> memory = nullptr);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_MEMORY_NODE_DEVICE_H_
