#include "server/daemon/memory/cuda_node_device.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/unique_fd.h"
#include "kernels/cuda/cuda_handles.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/driver.h"
#include "server/common/errors.h"
#include "server/daemon/memory/nccl_variables.h"
#include "server/daemon/memory/timed_holder.h"

namespace dmuond::server {
namespace {

using kernels::cuda::CudaMemoryHolder;
using kernels::cuda::Driver;

constexpr char kCuda[] = "cuda";
constexpr char kMpsVariable[] = "CUDA_MPS_PIPE_DIRECTORY";
constexpr char kMpsFolder[] = "/tmp/nvidia-mps";  // where the variable is not set
constexpr uint64_t kHandleBytes = 64;

// A device of this machine that the daemon sees, with a lane or without.
struct Gpu {
  std::string name;  // "cuda:0 (NVIDIA H200)"
  std::string uuid;
  std::string processors;  // near it; empty: not known
  std::unique_ptr<TimedHolder> memory;
};

// The processors near a device of the bus; empty: the kernel does not say.
std::string ProcessorsNearPci(const Driver& driver, CUdevice device, const std::string& folder) {
  char address[32] = "";
  if (driver.device_get_pci_bus_id(address, sizeof(address), device) != CUDA_SUCCESS) return "";
  std::string name = address;  // "0000:3B:00.0", and the kernel's names are in lower case
  absl::AsciiStrToLower(&name);
  std::ifstream file(absl::StrCat(folder, "/", name, "/local_cpulist"));
  std::string list;
  std::getline(file, list);
  return list;
}

// Two daemons do not share a device: each would plan with all of its memory. A name that only one
// process has at a time says whose it is; it goes with the process. It is that of an abstract
// socket, so daemons in other network namespaces do not see it.
absl::StatusOr<wire::UniqueFd> Claim(const Gpu& gpu) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = absl::StrCat("dmuond-device-", gpu.uuid);
  std::memcpy(address.sun_path + 1, name.data(),
              std::min(name.size(), sizeof(address.sun_path) - 1));
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  wire::UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return absl::ErrnoToStatus(errno, "socket");
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), size) == 0) {
    if (::listen(socket.get(), 1) == 0) return socket;
    return absl::ErrnoToStatus(errno, "listen");
  }
  if (errno != EADDRINUSE) return absl::ErrnoToStatus(errno, "bind");
  ucred owner{};
  socklen_t owner_size = sizeof(owner);
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), size) == 0) {
    ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &owner, &owner_size);
  }
  return absl::AlreadyExistsError(absl::StrCat(gpu.name, ", ", gpu.uuid,
                                               " is another daemon's (pid ", owner.pid,
                                               "): a device has the lane of one daemon"));
}

// A folder in which no control daemon of MPS listens.
absl::Status MakeEmptyFolder(const std::string& path) {
  if (::mkdir(path.c_str(), 0700) == 0 || errno == EEXIST) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat("making ", path));
}

class CudaNodeDevice final : public NodeDevice {
 public:
  CudaNodeDevice(const DeviceList& list, const NodeDeviceOptions& options)
      : lanes_(list.ordinals),
        memory_timeout_(options.memory_timeout),
        no_mps_folder_(options.no_mps_folder),
        pci_devices_(options.pci_devices) {
    // Without MPS, because a daemon that is one of its clients would end with it. Lanes have the
    // daemon's control daemon, or what the user has set, or nothing.
    const char* const mps = std::getenv(kMpsVariable);
    lanes_mps_ = options.lanes_use_mps ? std::string(mps == nullptr ? "" : mps) : no_mps_folder_;
    if (!options.mps_folder.empty()) lanes_mps_ = options.mps_folder;
    rail_address_ = options.rail_address;
  }
  ~CudaNodeDevice() override { ::rmdir(no_mps_folder_.c_str()); }
  CudaNodeDevice(const CudaNodeDevice&) = delete;
  CudaNodeDevice& operator=(const CudaNodeDevice&) = delete;

  absl::Status Open() {
    if (absl::Status made = MakeEmptyFolder(no_mps_folder_); !made.ok()) return made;
    ::setenv(kMpsVariable, no_mps_folder_.c_str(), /*overwrite=*/1);
    const absl::StatusOr<const Driver*> driver = Driver::Get();
    if (!driver.ok()) return driver.status();
    int count = 0;
    absl::Status status = (*driver)->Check((*driver)->device_get_count(&count), "cuDeviceGetCount");
    if (!status.ok()) return status;
    for (const int32_t ordinal : lanes_) {
      if (ordinal >= count) return kernels::cuda::FindDevice(**driver, ordinal).status();
    }
    for (int ordinal = 0; ordinal < count; ++ordinal) {
      absl::StatusOr<std::unique_ptr<CudaMemoryHolder>> memory = CudaMemoryHolder::Create(ordinal);
      if (!memory.ok()) return memory.status();
      const absl::StatusOr<CUdevice> device = kernels::cuda::FindDevice(**driver, ordinal);
      if (!device.ok()) return device.status();
      const std::string name = kernels::cuda::NameOf(**driver, *device);
      gpus_.push_back({name, kernels::cuda::UuidOf(**driver, *device),
                       ProcessorsNearPci(**driver, *device, pci_devices_),
                       std::make_unique<TimedHolder>(name, *std::move(memory), memory_timeout_)});
    }
    if (!rail_address_.empty()) {
      absl::StatusOr<Variables> rails = NcclVariables(rail_address_);
      if (!rails.ok()) return rails.status();
      rail_variables_ = *std::move(rails);
    }
    return ClaimLanes();
  }

  std::string type() const override { return kCuda; }
  std::string OfLane(scheduler::LaneIndex lane) const override {
    return absl::StrCat(kCuda, ":", lanes_[lane.value()]);
  }
  std::string ProcessorsNear(scheduler::LaneIndex lane) const override {
    return gpus_[lanes_[lane.value()]].processors;
  }
  // With modules loaded one by one, when they are first called, a launch in the middle of a step
  // would wait for the device to be idle.
  Variables OfLaneEnvironment() const override {
    Variables variables = {{"CUDA_MODULE_LOADING", "EAGER"}, {kMpsVariable, lanes_mps_}};
    variables.insert(variables.end(), rail_variables_.begin(), rail_variables_.end());
    return variables;
  }
  std::vector<std::string> Uuids() const override {
    std::vector<std::string> uuids;
    for (const int32_t ordinal : lanes_) uuids.push_back(gpus_[ordinal].uuid);
    return uuids;
  }
  bool TriesLanes() const override { return true; }
  bool Hangs() const override {
    return std::any_of(gpus_.begin(), gpus_.end(),
                       [](const Gpu& gpu) { return gpu.memory->hangs(); });
  }
  // With MPS sums empty the landing while gradients come; without, it must have room for all.
  int64_t LandingBytesMax() const override {
    constexpr int64_t kWithMps = int64_t{512} << 20;
    return TakesTurns() ? std::numeric_limits<int64_t>::max() : kWithMps;
  }
  // A context takes a fifth of a second, and those of several lanes come one after the other. With
  // MPS a process that ends in the middle of a kernel, one that waits for another node's say, takes
  // others on its device along, as measured.
  std::optional<std::chrono::milliseconds> ReleasesLanesWithin() const override {
    const bool harms = !rail_address_.empty() && !TakesTurns();
    return std::chrono::milliseconds(harms ? 3000 : 1000);
  }
  bool StateIsHostMemory() const override { return false; }
  int64_t GranuleBytes() const override {
    return static_cast<int64_t>(gpus_[lanes_.front()].memory->Rounded(1));
  }
  scheduler::CostTable Estimates() const override { return {}; }
  kernels::MemoryHolder& memory(scheduler::LaneIndex lane) override {
    return *gpus_[lanes_[lane.value()]].memory;
  }

  absl::StatusOr<kernels::MemoryHolder*> ArenaMemory(int32_t rank,
                                                     const std::string& uuid) override {
    if (uuid.empty()) {
      return Error(absl::StatusCode::kInvalidArgument, "DEVICE_UNKNOWN",
                   Say("rank ", Named("rank", rank), " computes on no GPU, but the lanes of this ",
                       "daemon run on GPUs (--devices)"));
    }
    if (const Gpu* gpu = Find(uuid); gpu != nullptr) return gpu->memory.get();
    return Error(
        absl::StatusCode::kInvalidArgument, "DEVICE_UNKNOWN",
        Say("rank ", Named("rank", rank), " computes on device ", Named("device", uuid),
            ", which is none of those that this daemon sees: ", Named("devices", Describe(gpus_))));
  }

  std::optional<scheduler::LaneIndex> LaneOf(const std::string& uuid) const override {
    for (size_t lane = 0; lane < lanes_.size(); ++lane) {
      if (gpus_[lanes_[lane]].uuid == uuid) return scheduler::LaneIndex(static_cast<int32_t>(lane));
    }
    return std::nullopt;
  }

  absl::Status CheckArena(int32_t rank, const std::string& uuid,
                          const v1::Arena& arena) const override {
    if (!arena.has_cuda_ipc()) return absl::OkStatus();
    const v1::Arena::CudaIpc& ipc = arena.cuda_ipc();
    const auto wrong = [&](auto... why) {
      return Error(absl::StatusCode::kInvalidArgument, "ARENA_INVALID",
                   Say("arena ", Named("arena", arena.id()), " of rank ", Named("rank", rank), ": ",
                       why...));
    };
    if (ipc.handle().size() != kHandleBytes) {
      return wrong("a CUDA IPC handle has ", Named("handle_bytes_wanted", kHandleBytes),
                   " bytes, this one ", Named("handle_bytes", ipc.handle().size()));
    }
    if (Find(ipc.device_uuid()) == nullptr) {
      return wrong(
          "its memory is of device ", Named("device", ipc.device_uuid()),
          ", which is none of those that this daemon sees: ", Named("devices", Describe(gpus_)));
    }
    if (ipc.device_uuid() != uuid) {
      return wrong("its memory is of device ", Named("device", ipc.device_uuid()),
                   ", but the rank computes on ", Named("rank_device", uuid));
    }
    const auto bytes = static_cast<uint64_t>(arena.size_bytes());
    if (ipc.base_offset() % kernels::kHandleOffsetAlignment != 0 ||
        ipc.base_offset() > ipc.allocation_bytes() ||
        bytes > ipc.allocation_bytes() - ipc.base_offset()) {
      return wrong("it begins at byte ", Named("base_offset", ipc.base_offset()), " and has ",
                   Named("bytes", bytes), " bytes; an arena lies within its allocation, of ",
                   Named("allocation_bytes", ipc.allocation_bytes()),
                   " bytes, and begins at a multiple of ",
                   Named("alignment", kernels::kHandleOffsetAlignment));
    }
    return absl::OkStatus();
  }

 private:
  // Where MPS runs, its control daemon listens in the folder.
  [[nodiscard]] bool TakesTurns() const {
    const std::string folder = lanes_mps_.empty() ? kMpsFolder : lanes_mps_;
    return ::access((folder + "/control").c_str(), F_OK) != 0;
  }

  static std::string Describe(const std::vector<Gpu>& gpus) {
    return absl::StrJoin(gpus, ", ", [](std::string* out, const Gpu& gpu) {
      absl::StrAppend(out, gpu.name, " ", gpu.uuid);
    });
  }

  [[nodiscard]] const Gpu* Find(const std::string& uuid) const {
    for (const Gpu& gpu : gpus_) {
      if (gpu.uuid == uuid) return &gpu;
    }
    return nullptr;
  }

  absl::Status ClaimLanes() {
    for (size_t lane = 0; lane < lanes_.size(); ++lane) {
      const Gpu& gpu = gpus_[lanes_[lane]];
      for (size_t before = 0; before < lane; ++before) {
        if (gpus_[lanes_[before]].uuid != gpu.uuid) continue;
        return absl::AlreadyExistsError(absl::StrCat("lanes ", before, " and ", lane, ", ",
                                                     gpus_[lanes_[before]].name, " and ", gpu.name,
                                                     ", would have one device, ", gpu.uuid));
      }
      absl::StatusOr<wire::UniqueFd> claim = Claim(gpu);
      if (!claim.ok()) return claim.status();
      claims_.push_back(*std::move(claim));
    }
    return absl::OkStatus();
  }

  const std::vector<int32_t> lanes_;  // ordinals
  const std::chrono::milliseconds memory_timeout_;
  const std::string no_mps_folder_;
  const std::string pci_devices_;
  std::string lanes_mps_;
  std::string rail_address_;
  Variables rail_variables_;
  std::vector<Gpu> gpus_;  // by ordinal
  std::vector<wire::UniqueFd> claims_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<NodeDevice>> OpenCudaNodeDevice(const DeviceList& list,
                                                               const NodeDeviceOptions& options) {
  auto device = std::make_unique<CudaNodeDevice>(list, options);
  if (absl::Status opened = device->Open(); !opened.ok()) return opened;
  return device;
}

}  // namespace dmuond::server
