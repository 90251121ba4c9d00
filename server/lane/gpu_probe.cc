#include "server/lane/gpu_probe.h"

#include <cuda.h>
#include <dlfcn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "kernels/cuda/cuda_handles.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/driver.h"
#include "kernels/cuda/free_memory.h"
#include "nlohmann/json.hpp"
#include "server/lane/nccl_library.h"

namespace dmuond::server::lane {
namespace {

using kernels::cuda::Driver;
using Json = nlohmann::ordered_json;

constexpr size_t kProbeBytes = 4096;

void Print(const Json& json) {
  const std::string line =
      json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";  // names may be no UTF-8
  std::fputs(line.c_str(), stdout);
  std::fflush(stdout);
}

void PrintAt(const std::string& what) { Print({{"at", what}}); }

void AddError(Json& json, const char* name, const absl::Status& status) {
  if (!status.ok()) json[name] = std::string(status.message());
}

// Makes the device's primary context current in this thread, for as long as the process lives.
absl::Status EnterContext(const Driver& driver, CUdevice device) {
  CUcontext context = nullptr;
  absl::Status status =
      driver.Check(driver.primary_context_retain(&context, device), "cuDevicePrimaryCtxRetain");
  if (status.ok()) status = driver.Check(driver.context_set_current(context), "cuCtxSetCurrent");
  return status;
}

// A second process. The driver opens a 64-byte handle in another process than that which made it,
// and a process that has loaded the driver cannot be forked: this one is forked before.
class OtherProcess {
 public:
  OtherProcess() {
    std::array<int, 2> ends{-1, -1};
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0) return;
    ours_.Reset(ends[0]);
    wire::UniqueFd theirs(ends[1]);
    pid_ = ::fork();
    if (pid_ != 0) return;
    ours_.Reset();
    Serve(theirs.get());
    ::_exit(0);
  }
  // It ends by itself: a client of MPS that is killed may take others along.
  ~OtherProcess() {
    ours_.Reset();
    if (pid_ > 0) ::waitpid(pid_, nullptr, 0);
  }
  OtherProcess(const OtherProcess&) = delete;
  OtherProcess& operator=(const OtherProcess&) = delete;

  // Whether a device's memory that this process has made is mapped there.
  absl::Status Open(const Driver& driver, CUdevice device, const CUipcMemHandle& handle) const {
    Question question{.ordinal = device, .handle = handle, .uuid = {}};
    const std::string uuid = kernels::cuda::UuidOf(driver, device);
    uuid.copy(question.uuid, sizeof(question.uuid) - 1);
    std::array<char, 1024> answer{};
    if (::send(ours_.get(), &question, sizeof(question), MSG_NOSIGNAL) != sizeof(question)) {
      return absl::InternalError("there is no second process");
    }
    const ssize_t size = ::recv(ours_.get(), answer.data(), answer.size(), 0);
    if (size <= 0) return absl::InternalError("the process that opens the handle has ended");
    const absl::string_view text(answer.data(), size - 1);  // an empty packet would be an end
    return text.empty() ? absl::OkStatus() : absl::InternalError(text);
  }

 private:
  struct Question {
    CUdevice ordinal;
    CUipcMemHandle handle;
    char uuid[64];
  };

  static absl::Status Answer(const Question& question) {
    ASSIGN_OR_RETURN(const Driver* const driver, Driver::Get());
    ASSIGN_OR_RETURN(const CUdevice device, kernels::cuda::FindDevice(*driver, question.ordinal));
    RETURN_IF_ERROR(EnterContext(*driver, device));
    kernels::cuda::CudaHandles handles(*driver, device);
    return handles
        .Map({.handle = std::string(question.handle.reserved, sizeof(question.handle.reserved)),
              .device_uuid = question.uuid,
              .bytes = kProbeBytes})
        .status();
  }

  static void Serve(int socket) {
    Question question{};
    while (::recv(socket, &question, sizeof(question), 0) == sizeof(question)) {
      const absl::Status status = Answer(question);
      const std::string text = absl::StrCat(status.message().substr(0, 1000), "\n");
      ::send(socket, text.data(), text.size(), MSG_NOSIGNAL);
    }
  }

  pid_t pid_ = -1;
  wire::UniqueFd ours_;
};

Json NcclHere() {
  const absl::StatusOr<Nccl> nccl = Nccl::Load();
  if (nccl.ok()) return {{"version", Nccl::VersionText(nccl->version)}};
  absl::string_view why = nccl.status().message();
  absl::ConsumeSuffix(&why, absl::StrCat("; ", kNcclToInstall));
  return {{"error", std::string(why)}, {"remedy", kNcclToInstall}};
}

// As the kernel module calls itself; empty where it is not there to be read.
std::string KernelModule() {
  std::ifstream file("/proc/driver/nvidia/version");
  std::string line;
  std::getline(file, line);
  return line;
}

// nullptr: there is none that lanes could use.
const Driver* PrintDriver() {
  PrintAt("loading libcuda.so.1 and cuInit");
  const bool found = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL) != nullptr;
  const absl::StatusOr<const Driver*> driver = Driver::Get();
  if (!driver.ok()) {
    Print({{"driver", {{"found", found}, {"error", std::string(driver.status().message())}}}});
    return nullptr;
  }
  int version = 0;
  (*driver)->driver_get_version(&version);
  const std::string text = absl::StrCat(version / 1000, ".", version % 1000 / 10);
  Print({{"driver",
          {{"version", text},
           {"needed", absl::StrCat(CUDA_VERSION / 1000, ".0")},
           {"name", KernelModule()}}}});
  return *driver;
}

absl::Status ProbeDescriptor(const Driver& driver, CUdevice device, bool in_context) {
  ASSIGN_OR_RETURN(const auto holder, kernels::cuda::CudaMemoryHolder::Create(device));
  ASSIGN_OR_RETURN(const auto memory, holder->Allocate(kProbeBytes, "doctor"));
  RETURN_IF_ERROR(holder->Check(memory.get(), kProbeBytes));
  if (!in_context) return absl::OkStatus();
  ASSIGN_OR_RETURN(const size_t granularity, kernels::cuda::Granularity(driver, device));
  return kernels::cuda::MapForDevice(driver, device, granularity, memory.get(), kProbeBytes)
      .status();
}

// REQUIRES: the thread has a context of the device.
absl::Status ProbeHandle(const Driver& driver, CUdevice device, const OtherProcess& other) {
  CUdeviceptr address = 0;
  absl::Status status = driver.Check(driver.mem_alloc(&address, kProbeBytes), "cuMemAlloc");
  if (!status.ok()) return status;
  CUipcMemHandle handle{};
  status = driver.Check(driver.ipc_get(&handle, address), "cuIpcGetMemHandle");
  if (status.ok()) status = other.Open(driver, device, handle);
  driver.mem_free(address);
  return status;
}

int AttributeOf(const Driver& driver, CUdevice device, CUdevice_attribute attribute) {
  int value = 0;
  driver.device_get_attribute(&value, attribute, device);
  return value;
}

Json Describe(const Driver& driver, CUdevice device, int count) {
  char name[256] = "unknown";
  driver.device_get_name(name, sizeof(name), device);
  const auto attribute = [&](CUdevice_attribute which) {
    return AttributeOf(driver, device, which);
  };
  const std::string uuid = kernels::cuda::UuidOf(driver, device);
  Json peers = Json::array();
  for (CUdevice peer = 0; peer < count; ++peer) {
    int can = 0;
    if (peer == device) continue;
    driver.device_can_access_peer(&can, device, peer);
    if (can != 0) peers.push_back(peer);
  }
  Json json = {{"ordinal", device},
               {"name", name},
               {"uuid", uuid},
               {"major", attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)},
               {"minor", attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)},
               {"compute_mode", attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_MODE)},
               {"mps", attribute(CU_DEVICE_ATTRIBUTE_MPS_ENABLED) != 0},
               {"stream_ops_64", attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS) != 0},
               {"peers", peers}};
  // Before this process takes some for its context.
  if (const auto memory = kernels::cuda::FreeMemoryOf(uuid); memory.has_value()) {
    json["free_bytes"] = memory->free_bytes;
    json["total_bytes"] = memory->total_bytes;
  }
  return json;
}

void PrintDevice(const Driver& driver, CUdevice device, int count, const OtherProcess& other) {
  const std::string name = kernels::cuda::NameOf(driver, device);
  PrintAt(absl::StrCat("attributes of ", name));
  Json json = Describe(driver, device, count);
  PrintAt(absl::StrCat("a context on ", name));
  const absl::Status entered = EnterContext(driver, device);
  AddError(json, "context", entered);
  PrintAt(absl::StrCat("memory by descriptor on ", name));
  AddError(json, "descriptor", ProbeDescriptor(driver, device, entered.ok()));
  if (entered.ok()) {
    PrintAt(absl::StrCat("memory by handle on ", name));
    AddError(json, "handle", ProbeHandle(driver, device, other));
  }
  Print({{"device", json}});
}

}  // namespace

void PrintGpuProbe() {
  {
    const OtherProcess other;
    PrintAt("loading NCCL");
    Print({{"nccl", NcclHere()}});
    if (const Driver* const driver = PrintDriver(); driver != nullptr) {
      int count = 0;
      driver->device_get_count(&count);
      for (CUdevice device = 0; device < count; ++device) {
        PrintDevice(*driver, device, count, other);
      }
    }
    PrintAt("the end of the process that opens handles");
  }
  Print({{"done", true}});
}

}  // namespace dmuond::server::lane
