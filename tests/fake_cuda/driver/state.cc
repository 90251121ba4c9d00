#include "tests/fake_cuda/driver/state.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>

#include "base/fault_point.h"

namespace dmuond::fake_cuda {
namespace {

thread_local Context* current = nullptr;

std::string Text(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}
int64_t Number(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::strtoll(value, nullptr, 10);
}

Settings ReadSettings() {
  Settings settings;
  settings.memory_bytes = static_cast<size_t>(Number("FAKE_CUDA_MEMORY_MIB", 4096)) << 20;
  settings.name = Text("FAKE_CUDA_NAME", "Fake GPU");
  const std::string capability = Text("FAKE_CUDA_CAPABILITY", "9.0");
  std::sscanf(capability.c_str(), "%d.%d", &settings.major, &settings.minor);
  settings.peers = Number("FAKE_CUDA_PEERS", 1) != 0;
  settings.mps = Number("FAKE_CUDA_MPS", 0) != 0;
  settings.stream_ops = Number("FAKE_CUDA_STREAM_OPS", 1) != 0;
  settings.compute_mode = static_cast<int>(Number("FAKE_CUDA_COMPUTE_MODE", 0));
  settings.version = static_cast<int>(Number("FAKE_CUDA_VERSION", CUDA_VERSION));
  settings.machine = static_cast<int>(Number("FAKE_CUDA_MACHINE", 0));
  settings.not_ready = Number("FAKE_CUDA_NOT_READY", 0);
  settings.delay_us = static_cast<int>(Number("FAKE_CUDA_DELAY_US", 50));
  settings.seed = static_cast<uint64_t>(Number("FAKE_CUDA_SEED", 1));
  settings.fault_kernel = Number("FAKE_CUDA_FAULT_KERNEL", 0);
  settings.no_context = Text("FAKE_CUDA_NO_CONTEXT", "");
  settings.log = Text("FAKE_CUDA_LOG", "");
  const int devices = static_cast<int>(Number("FAKE_CUDA_DEVICES", 1));
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) {
    for (int device = 0; device < devices; ++device) settings.visible.push_back(device);
  } else {
    // As the driver does, up to the first that is none.
    for (const char* at = visible; *at != '\0';) {
      char* end = nullptr;
      const long device = std::strtol(at, &end, 10);
      if (end == at || device < 0 || device >= devices) break;
      settings.visible.push_back(static_cast<int>(device));
      at = *end == ',' ? end + 1 : end;
    }
  }
  settings.devices = static_cast<int>(settings.visible.size());
  return settings;
}

std::string ProgramName() {
  std::string name;
  std::ifstream file("/proc/self/comm");
  std::getline(file, name);
  return name;
}

bool MayHaveNoContext() {
  const std::string& program = All().settings.no_context;
  return !program.empty() && ProgramName() == program;
}

// Who is a client of MPS ends with the others.
void MustNotUseMps() {
  const std::string folder = Text("CUDA_MPS_PIPE_DIRECTORY", "");
  std::error_code error;
  if (std::filesystem::is_empty(folder, error) && !error) return;
  Abort("%s calls cuInit() with CUDA_MPS_PIPE_DIRECTORY='%s', which is no empty folder",
        All().settings.no_context.c_str(), folder.c_str());
}

}  // namespace

void Abort(const char* format, ...) {
  std::fputs("fake CUDA driver: ", stderr);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputs("\n", stderr);
  std::abort();
}

State& All() {
  static State& state = *new State();  // workers may outlive what static objects do
  return state;
}

int64_t NowNs() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

static bool Append(const std::string& path, const std::string& line) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) return false;
  const bool whole = ::write(fd, line.data(), line.size()) == static_cast<ssize_t>(line.size());
  ::close(fd);
  return whole;
}

void Log(int device, const std::string& line) {
  const Settings& settings = All().settings;
  if (settings.log.empty()) return;
  const std::string path =
      settings.log + "/device-" + std::to_string(settings.visible[device]) + ".log";
  if (!Append(path, line)) Abort("cannot write to %s", path.c_str());
}

void LogCall(const char* name) {
  const State& all = All();
  if (all.settings.log.empty()) return;
  // A test's own process may outlive the folder.
  (void)Append(all.settings.log + "/calls.log",
               std::to_string(NowNs()) + " pid=" + std::to_string(all.pid) + " " + name + "\n");
}

CUresult NeedDriver() {
  const pid_t pid = All().pid;
  return pid != 0 && pid == ::getpid() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult NeedDevice(CUdevice device) {
  if (const CUresult result = NeedDriver(); result != CUDA_SUCCESS) return result;
  return device >= 0 && device < All().settings.devices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult NeedContext(Context** context) {
  if (const CUresult result = NeedDriver(); result != CUDA_SUCCESS) return result;
  if (current == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  *context = current;
  return current->error;
}

CUresult NeedStream(CUstream stream, std::shared_ptr<Stream>* found) {
  Context* context = nullptr;
  if (const CUresult result = NeedContext(&context); result != CUDA_SUCCESS) return result;
  State& all = All();
  std::lock_guard lock(all.mutex);
  if (stream == nullptr) {
    if (context->default_stream == nullptr) context->default_stream = Stream::Make(context);
    *found = context->default_stream;
    return CUDA_SUCCESS;
  }
  const auto at = all.streams.find(stream);
  if (at == all.streams.end()) return CUDA_ERROR_INVALID_HANDLE;
  *found = at->second;
  if ((*found)->context() != context) {
    Abort("work for a stream of device %d in the context of device %d", (*found)->context()->device,
          context->device);
  }
  return CUDA_SUCCESS;
}

}  // namespace dmuond::fake_cuda

using namespace dmuond::fake_cuda;  // NOLINT: the driver's interface is global

extern "C" {

CUresult cuInit(unsigned) {
  State& all = All();
  std::lock_guard lock(all.mutex);
  if (all.pid != 0) return NeedDriver();
  dmuond::fault::ConnectFaultDriver();
  all.settings = ReadSettings();
  if (MayHaveNoContext()) {
    MustNotUseMps();
  } else if (all.not_ready++ < all.settings.not_ready) {
    return CUDA_ERROR_MPS_SERVER_NOT_READY;
  }
  if (all.settings.devices == 0) return CUDA_ERROR_NO_DEVICE;
  for (int device = 0; device < all.settings.devices; ++device) {
    all.devices.push_back(std::make_unique<Device>());
  }
  all.pid = ::getpid();
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
  *version = All().pid == 0 ? ReadSettings().version : All().settings.version;
  return CUDA_SUCCESS;
}

// Versions of the interface are not told apart: the newest that is here answers for all.
CUresult cuGetProcAddress(const char* symbol, void** function, int, cuuint64_t,
                          CUdriverProcAddressQueryResult* found) {
  Dl_info self{};
  ::dladdr(reinterpret_cast<void*>(&cuGetProcAddress), &self);
  void* const library = ::dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  *function = nullptr;
  for (const char* version : {"_v3", "_v2", ""}) {
    *function = ::dlsym(library, (std::string(symbol) + version).c_str());
    if (*function != nullptr) break;
  }
  ::dlclose(library);
  if (found != nullptr) {
    *found =
        *function == nullptr ? CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND : CU_GET_PROC_ADDRESS_SUCCESS;
  }
  return *function == nullptr ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** name) {
  switch (error) {
#define DMUOND_ERROR(error) \
  case error:               \
    *name = #error;         \
    return CUDA_SUCCESS;
    DMUOND_ERROR(CUDA_SUCCESS)
    DMUOND_ERROR(CUDA_ERROR_INVALID_VALUE)
    DMUOND_ERROR(CUDA_ERROR_OUT_OF_MEMORY)
    DMUOND_ERROR(CUDA_ERROR_NOT_INITIALIZED)
    DMUOND_ERROR(CUDA_ERROR_NO_DEVICE)
    DMUOND_ERROR(CUDA_ERROR_INVALID_DEVICE)
    DMUOND_ERROR(CUDA_ERROR_INVALID_CONTEXT)
    DMUOND_ERROR(CUDA_ERROR_INVALID_HANDLE)
    DMUOND_ERROR(CUDA_ERROR_UNKNOWN)
    DMUOND_ERROR(CUDA_ERROR_NOT_FOUND)
    DMUOND_ERROR(CUDA_ERROR_NOT_READY)
    DMUOND_ERROR(CUDA_ERROR_OPERATING_SYSTEM)
    DMUOND_ERROR(CUDA_ERROR_NOT_SUPPORTED)
    DMUOND_ERROR(CUDA_ERROR_ILLEGAL_ADDRESS)
    DMUOND_ERROR(CUDA_ERROR_ALREADY_MAPPED)
    DMUOND_ERROR(CUDA_ERROR_MPS_SERVER_NOT_READY)
    DMUOND_ERROR(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)
    DMUOND_ERROR(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
    DMUOND_ERROR(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
    DMUOND_ERROR(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
#undef DMUOND_ERROR
    default:
      *name = nullptr;
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuGetErrorString(CUresult error, const char** text) { return cuGetErrorName(error, text); }

CUresult cuDeviceGetCount(int* count) {
  if (const CUresult result = NeedDriver(); result != CUDA_SUCCESS) return result;
  *count = All().settings.devices;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (const CUresult result = NeedDevice(ordinal); result != CUDA_SUCCESS) return result;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int bytes, CUdevice device) {
  if (const CUresult result = NeedDevice(device); result != CUDA_SUCCESS) return result;
  std::snprintf(name, bytes, "%s", All().settings.name.c_str());
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  if (const CUresult result = NeedDevice(device); result != CUDA_SUCCESS) return result;
  for (int i = 0; i < 16; ++i) uuid->bytes[i] = static_cast<char>(0xF0 + i);
  std::memcpy(uuid->bytes, &All().settings.machine, sizeof(All().settings.machine));
  uuid->bytes[15] = static_cast<char>(All().settings.visible[device]);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char* address, int bytes, CUdevice device) {
  if (const CUresult result = NeedDevice(device); result != CUDA_SUCCESS) return result;
  std::snprintf(address, bytes, "00F0:%02X:00.0", All().settings.visible[device]);
  return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t* bytes, CUdevice device) {
  if (const CUresult result = NeedDevice(device); result != CUDA_SUCCESS) return result;
  *bytes = All().settings.memory_bytes;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (const CUresult result = NeedDevice(device); result != CUDA_SUCCESS) return result;
  const Settings& settings = All().settings;
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = settings.major;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = settings.minor;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MPS_ENABLED:
      *value = settings.mps ? 1 : 0;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
      *value = settings.stream_ops ? 1 : 0;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
      *value = settings.compute_mode;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = 4;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
      *value = 2048;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
      *value = 3;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
      *value = 1;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES:
    case CU_DEVICE_ATTRIBUTE_INTEGRATED:
      *value = 0;
      return CUDA_SUCCESS;
    default:
      Abort("attribute %d is not in this driver yet", static_cast<int>(attribute));
  }
}

CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  for (const CUdevice one : {device, peer}) {
    if (const CUresult result = NeedDevice(one); result != CUDA_SUCCESS) return result;
  }
  *can = device != peer && All().settings.peers ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  if (const CUresult result = NeedDevice(device); result != CUDA_SUCCESS) return result;
  State& all = All();
  if (MayHaveNoContext()) {
    Abort("%s asks for a context of device %d, and may have none", all.settings.no_context.c_str(),
          device);
  }
  std::lock_guard lock(all.mutex);
  if (all.contexts_not_ready++ < all.settings.not_ready) return CUDA_ERROR_MPS_SERVER_NOT_READY;
  std::unique_ptr<Context>& primary = all.devices[device]->primary;
  if (primary == nullptr) {
    primary = std::make_unique<Context>();
    primary->device = device;
  }
  ++primary->retained;
  *context = reinterpret_cast<CUcontext>(primary.get());
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  if (const CUresult result = NeedDevice(device); result != CUDA_SUCCESS) return result;
  std::lock_guard lock(All().mutex);
  *flags = 0;
  *active = All().devices[device]->primary == nullptr ? 0 : 1;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  if (const CUresult result = NeedDriver(); result != CUDA_SUCCESS) return result;
  current = reinterpret_cast<Context*>(context);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  if (const CUresult result = NeedDriver(); result != CUDA_SUCCESS) return result;
  *context = reinterpret_cast<CUcontext>(current);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* device) {
  Context* context = nullptr;
  if (const CUresult result = NeedContext(&context); result != CUDA_SUCCESS) return result;
  *device = context->device;
  return CUDA_SUCCESS;
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned) {
  Context* context = nullptr;
  if (const CUresult result = NeedContext(&context); result != CUDA_SUCCESS) return result;
  if (peer == nullptr || reinterpret_cast<Context*>(peer) == context) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!All().settings.peers) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  std::lock_guard lock(All().mutex);
  return context->peers.insert(reinterpret_cast<Context*>(peer)->device).second
             ? CUDA_SUCCESS
             : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

}  // extern "C"
