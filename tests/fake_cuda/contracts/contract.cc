#include "tests/fake_cuda/contracts/contract.h"

#include <dlfcn.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "tests/fake_cuda/contract_kernels.h"

namespace dmuond::contracts {

std::string Text(const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  return text;
}

Seen Holds(const std::string& what) { return {Verdict::kHolds, what}; }
Seen Fails(const std::string& what) { return {Verdict::kFails, what}; }
Seen Skipped(const std::string& why) { return {Verdict::kSkipped, why}; }

std::vector<Contract>& Contracts() {
  static std::vector<Contract>& all = *new std::vector<Contract>();
  return all;
}

namespace {
void* Library() {
  static void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) throw Broken{Text("no driver: %s", ::dlerror())};
  return library;
}
}  // namespace

void* Symbol(const char* name) {
  void* const symbol = ::dlsym(Library(), name);
  if (symbol == nullptr) throw Broken{Text("the driver has no %s", name)};
  return symbol;
}

bool IsFake() { return ::dlsym(Library(), "fakeCudaLaunch") != nullptr; }

std::string Name(CUresult result) {
  const char* name = nullptr;
  CU(cuGetErrorName)(result, &name);
  return Text("%s (%d)", name == nullptr ? "unknown" : name, static_cast<int>(result));
}

void Must(CUresult result, const char* call) {
  if (result != CUDA_SUCCESS) throw Broken{Text("%s: %s", call, Name(result).c_str())};
}

int Attribute(CUdevice_attribute attribute, CUdevice device) {
  int value = 0;
  MUST(cuDeviceGetAttribute, &value, attribute, device);
  return value;
}

NotReady Initialise() {
  NotReady seen;
  const double begin = NowMs();
  for (;;) {
    const CUresult result = CU(cuInit)(0);
    if (result == CUDA_SUCCESS) break;
    const bool recovers =
        result == CUDA_ERROR_MPS_SERVER_NOT_READY || result == CUDA_ERROR_MPS_CONNECTION_FAILED;
    if (!recovers || NowMs() - begin > 15000) Must(result, "cuInit");
    ++seen.errors[result];
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  seen.milliseconds = NowMs() - begin;
  return seen;
}

int Devices() {
  Initialise();
  int count = 0;
  MUST(cuDeviceGetCount, &count);
  return count;
}

CUcontext UseContext(int device) {
  Initialise();
  CUcontext context = nullptr;
  MUST(cuDevicePrimaryCtxRetain, &context, device);
  MUST(cuCtxSetCurrent, context);
  return context;
}

CUmemAllocationProp Properties(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

size_t Granularity(int device) {
  const CUmemAllocationProp properties = Properties(device);
  size_t bytes = 0;
  MUST(cuMemGetAllocationGranularity, &bytes, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  return bytes;
}

CUmemGenericAllocationHandle Make(size_t bytes, int device) {
  const CUmemAllocationProp properties = Properties(device);
  CUmemGenericAllocationHandle handle = 0;
  MUST(cuMemCreate, &handle, bytes, &properties, 0);
  return handle;
}

int Export(CUmemGenericAllocationHandle handle) {
  int fd = -1;
  MUST(cuMemExportToShareableHandle, &fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  return fd;
}

CUmemGenericAllocationHandle Import(int fd) {
  CUmemGenericAllocationHandle handle = 0;
  MUST(cuMemImportFromShareableHandle, &handle, reinterpret_cast<void*>(static_cast<intptr_t>(fd)),
       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  return handle;
}

CUdeviceptr Map(CUmemGenericAllocationHandle handle, size_t bytes, int access) {
  CUdeviceptr address = 0;
  MUST(cuMemAddressReserve, &address, bytes, 0, 0, 0);
  MUST(cuMemMap, address, bytes, 0, handle, 0);
  if (access >= 0) {
    CUmemAccessDesc allowed{};
    allowed.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    allowed.location.id = access;
    allowed.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    MUST(cuMemSetAccess, address, bytes, &allowed, 1);
  }
  return address;
}

void Unmap(CUdeviceptr address, size_t bytes) {
  MUST(cuMemUnmap, address, bytes);
  MUST(cuMemAddressFree, address, bytes);
}

CUstream MakeStream() {
  CUstream stream = nullptr;
  MUST(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
  return stream;
}

CUevent MakeEvent(unsigned flags) {
  CUevent event = nullptr;
  MUST(cuEventCreate, &event, flags);
  return event;
}

uint64_t* Pinned(size_t bytes) {
  void* memory = nullptr;
  MUST(cuMemHostAlloc, &memory, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
  std::memset(memory, 0, bytes);
  return static_cast<uint64_t*>(memory);
}

void Set(CUdeviceptr address, size_t bytes, uint32_t value) {
  CUstream stream = MakeStream();
  MUST(cuMemsetD32Async, address, value, bytes / 4, stream);
  MUST(cuStreamSynchronize, stream);
  MUST(cuStreamDestroy, stream);
}

bool All(CUdeviceptr address, size_t bytes, uint32_t value, std::string* other) {
  std::vector<uint32_t> host(bytes / 4, ~value);
  CUstream stream = MakeStream();
  MUST(cuMemcpyDtoHAsync, host.data(), address, bytes, stream);
  MUST(cuStreamSynchronize, stream);
  MUST(cuStreamDestroy, stream);
  for (size_t i = 0; i < host.size(); ++i) {
    if (host[i] == value) continue;
    *other = Text("word %zu of %zu is %#x, not %#x", i, host.size(), host[i], value);
    return false;
  }
  return true;
}

double NowMs() {
  return std::chrono::duration<double, std::milli>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

bool Within(int milliseconds, const std::function<bool()>& done) {
  const double end = NowMs() + milliseconds;
  do {
    if (done()) return true;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  } while (NowMs() < end);
  return done();
}

// ---- Gate ----

Gate::Gate() : word_(Pinned(4096)) {}

Gate::~Gate() {
  if (later_.joinable()) later_.join();
  Open();
}

void Gate::Close(CUstream stream) {
  MUST(cuStreamWaitValue64, stream, At(word_), 1, CU_STREAM_WAIT_VALUE_GEQ);
}

void Gate::Open() {
  opened_ = true;
  __atomic_store_n(word_, 1, __ATOMIC_RELEASE);
}

void Gate::OpenAfter(int milliseconds) {
  later_ = std::thread([this, milliseconds] {
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    Open();
  });
}

// ---- Processes ----

void Channel::Send(const std::string& bytes, int fd) {
  const std::string message = "+" + bytes;
  iovec part{const_cast<char*>(message.data()), message.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (fd >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    cmsghdr* const rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &fd, sizeof(fd));
  }
  if (::sendmsg(socket_, &header, MSG_NOSIGNAL) < 0) throw Broken{"the other process has ended"};
}

std::string Channel::Receive(int* fd) {
  char bytes[4096];
  iovec part{bytes, sizeof(bytes)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  const ssize_t received = ::recvmsg(socket_, &header, MSG_CMSG_CLOEXEC);
  if (received <= 0) throw Broken{"the other process has ended"};
  const std::string message(bytes, received);
  if (message[0] != '+') throw Broken{"in the other process: " + message.substr(1)};
  if (fd != nullptr) {
    cmsghdr* const rights = CMSG_FIRSTHDR(&header);
    if (rights == nullptr) throw Broken{"no descriptor came"};
    std::memcpy(fd, CMSG_DATA(rights), sizeof(*fd));
  }
  return message.substr(1);
}

Child::Child(const std::function<void(Channel&)>& run) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
    throw Broken{"socketpair"};
  pid_ = ::fork();
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::close(ends[0]);
    Channel parent(ends[1]);
    try {
      run(parent);
    } catch (const Broken& broken) {
      const std::string message = "-" + broken.what;
      ::send(ends[1], message.data(), message.size(), MSG_NOSIGNAL);
      ::_exit(1);
    }
    ::_exit(0);
  }
  ::close(ends[1]);
  channel_ = Channel(ends[0]);
}

Child::~Child() { Kill(); }

void Child::Kill() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  Wait();
}

int Child::Wait() {
  int status = 0;
  if (pid_ > 0) ::waitpid(pid_, &status, 0);
  pid_ = -1;
  return status;
}

// ---- Kernels ----

namespace {

CUfunction Kernel(const char* name) {
  static CUmodule module = [] {
    CUmodule loaded = nullptr;
    MUST(cuModuleLoadData, &loaded, testing::kContractKernels);
    return loaded;
  }();
  CUfunction function = nullptr;
  MUST(cuModuleGetFunction, &function, module, name);
  return function;
}

}  // namespace

Spin::Spin() : stream_(MakeStream()) {
  const int threads = 1024;
  const int blocks = Attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) *
                     (Attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR) / threads);
  stop_ = Pinned(4096);
  uint64_t* started = Pinned(blocks * sizeof(uint64_t));
  CUdeviceptr stop_address = At(stop_);
  CUdeviceptr started_address = At(started);
  void* parameters[] = {&stop_address, &started_address};
  MUST(cuLaunchKernel, Kernel("contract_spin"), blocks, 1, 1, threads, 1, 1, 0, stream_, parameters,
       nullptr);
  const bool runs = Within(5000, [&] {
    for (int i = 0; i < blocks; ++i) {
      if (__atomic_load_n(started + i, __ATOMIC_ACQUIRE) == 0) return false;
    }
    return true;
  });
  if (!runs) {
    End();
    throw Broken{Text("a kernel of %d blocks does not run all at once", blocks)};
  }
}

void Spin::End() {
  __atomic_store_n(stop_, 1, __ATOMIC_RELEASE);
  CU(cuStreamSynchronize)(stream_);
}

void Store(CUstream stream, CUdeviceptr address, uint64_t value) {
  void* parameters[] = {&address, &value};
  MUST(cuLaunchKernel, Kernel("contract_store"), 1, 1, 1, 1, 1, 1, 0, stream, parameters, nullptr);
}

}  // namespace dmuond::contracts
