// Device memory is memfds. An address range for a device is mapped for nobody; the range behind it,
// of the same size, is where workers find the bytes.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <limits>

#include "base/fault_point.h"
#include "tests/fake_cuda/driver/state.h"

namespace dmuond::fake_cuda {
namespace {

constexpr char kName[] = "fake_cuda:";

std::string PathOf(pid_t pid, int fd) {
  return "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
}

// The machine's number of the device whose memory this is; -1: none.
int DeviceOfDescriptor(int fd) {
  char target[128] = {};
  const ssize_t length = ::readlink(PathOf(::getpid(), fd).c_str(), target, sizeof(target) - 1);
  const std::string prefix = std::string("/memfd:") + kName;
  if (length <= 0 || std::strncmp(target, prefix.c_str(), prefix.size()) != 0) return -1;
  return std::atoi(target + prefix.size());
}

// `path`: of memory's descriptor, here or in another process. nullptr: it is none.
std::shared_ptr<Allocation> Open(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return nullptr;
  auto allocation = std::make_shared<Allocation>();
  allocation->fd = fd;
  if (::flock(fd, LOCK_SH) != 0) return nullptr;  // UsedBytes() looks for it
  struct stat status {};
  if (::fstat(fd, &status) != 0) return nullptr;
  allocation->bytes = static_cast<size_t>(status.st_size);
  allocation->inode = status.st_ino;
  const int machine = DeviceOfDescriptor(fd);
  const std::vector<int>& visible = All().settings.visible;
  for (size_t device = 0; device < visible.size(); ++device) {
    if (visible[device] != machine) continue;
    allocation->device = static_cast<int>(device);
    return allocation;
  }
  return nullptr;
}

Mapped* MapWhole(size_t bytes, const std::shared_ptr<Allocation>& allocation, uintptr_t* address,
                 CUresult* result) {
  *result = Reserve(bytes, kGranularity, address);
  if (*result == CUDA_SUCCESS) *result = MapAt(*address, bytes, allocation);
  if (*result != CUDA_SUCCESS) return nullptr;
  Mapped* mapped = FindMapped(*address);
  mapped->legacy = true;
  return mapped;
}

bool Overlap(const Range& a, uintptr_t begin, size_t bytes) {
  return a.begin < begin + bytes && begin < a.begin + a.bytes;
}

// What cuIpcGetMemHandle() gives away.
struct HandleBytes {
  char magic[8];
  pid_t pid;
  int fd;
  ino_t inode;
  size_t bytes;
};
static_assert(sizeof(HandleBytes) <= sizeof(CUipcMemHandle));
constexpr char kMagic[8] = {'f', 'a', 'k', 'e', 'c', 'u', 'd', 'a'};

}  // namespace

Allocation::~Allocation() {
  if (fd >= 0) ::close(fd);
}

Reservation* FindReservation(uintptr_t address, uintptr_t* begin) {
  auto& all = All().reservations;
  auto at = all.upper_bound(address);
  if (at == all.begin()) return nullptr;
  --at;
  if (address - at->first >= at->second.bytes) return nullptr;
  if (begin != nullptr) *begin = at->first;
  return &at->second;
}

Mapped* FindMapped(uintptr_t address, uintptr_t* begin) {
  Reservation* reservation = FindReservation(address);
  if (reservation == nullptr) return nullptr;
  auto at = reservation->mapped.upper_bound(address);
  if (at == reservation->mapped.begin()) return nullptr;
  --at;
  if (address - at->first >= at->second.bytes) return nullptr;
  if (begin != nullptr) *begin = at->first;
  return &at->second;
}

bool IsPinned(uintptr_t address, size_t bytes) {
  auto& host = All().host;
  auto at = host.upper_bound(address);
  if (at == host.begin()) return false;
  --at;
  return address + bytes <= at->first + at->second.bytes;
}

int OwnerOf(uintptr_t address) {
  const Mapped* mapped = FindMapped(address);
  return mapped == nullptr ? -1 : mapped->allocation->device;
}

bool Accessible(uintptr_t address, size_t bytes, const Context& context, Use use) {
  if (FindReservation(address) == nullptr) {
    // Streams' words and kernels need pinned memory, copies any.
    return use == Use::kCopy || IsPinned(address, bytes);
  }
  while (bytes > 0) {
    uintptr_t begin = 0;
    const Mapped* mapped = FindMapped(address, &begin);
    if (mapped == nullptr) return false;
    const bool reached = mapped->access.contains(context.device) ||
                         (mapped->legacy && (use == Use::kCopy ||
                                             context.peers.contains(mapped->allocation->device)));
    if (!reached) return false;
    const size_t here = std::min(bytes, begin + mapped->bytes - address);
    address += here;
    bytes -= here;
  }
  return true;
}

void MustBeIdle(uintptr_t address, size_t bytes, const char* call) {
  for (const State::Pending& pending : All().pending) {
    if (!Overlap(pending.range, address, bytes)) continue;
    Abort("%s of [%#zx, %#zx), which queued work uses: %s of [%#zx, %#zx)", call, address,
          address + bytes, pending.name.c_str(), pending.range.begin,
          pending.range.begin + pending.range.bytes);
  }
}

size_t UsedBytes(int device) {
  size_t used = 0;
  auto& made = All().made;
  for (auto at = made.begin(); at != made.end();) {
    // Every open file of the memory, here or elsewhere, has a shared lock on it.
    if (::flock(at->fd, LOCK_EX | LOCK_NB) == 0) {
      ::close(at->fd);
      at = made.erase(at);
      continue;
    }
    if (at->device == device) used += at->bytes;
    ++at;
  }
  return used;
}

CUresult MakeAllocation(size_t bytes, int device, std::shared_ptr<Allocation>* made) {
  State& all = All();
  const size_t used = UsedBytes(device);
  if (bytes > all.settings.memory_bytes || used > all.settings.memory_bytes - bytes) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  const std::string name = kName + std::to_string(all.settings.visible[device]);
  const int created = ::memfd_create(name.c_str(), MFD_CLOEXEC);
  if (created < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  std::shared_ptr<Allocation> allocation = Open(PathOf(all.pid, created));
  const int watched = ::open(PathOf(all.pid, created).c_str(), O_RDWR | O_CLOEXEC);
  const int sized = ::ftruncate(created, static_cast<off_t>(bytes));
  ::close(created);
  if (allocation == nullptr || watched < 0 || sized != 0) {
    if (watched >= 0) ::close(watched);
    return CUDA_ERROR_OPERATING_SYSTEM;  // no descriptors are left
  }
  allocation->bytes = bytes;
  all.made.push_back({watched, bytes, device});
  *made = std::move(allocation);
  return CUDA_SUCCESS;
}

CUresult Reserve(size_t bytes, size_t alignment, uintptr_t* address) {
  alignment = std::max(alignment, kGranularity);
  if (bytes == 0 || bytes % kGranularity != 0 || bytes > (size_t{1} << 44)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const size_t place_bytes = 2 * bytes + alignment;
  void* place =
      ::mmap(nullptr, place_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (place == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = (reinterpret_cast<uintptr_t>(place) + alignment - 1) / alignment * alignment;
  All().reservations[*address] = {bytes, static_cast<std::byte*>(place), place_bytes, {}};
  return CUDA_SUCCESS;
}

CUresult MapAt(uintptr_t address, size_t bytes, std::shared_ptr<Allocation> allocation) {
  uintptr_t begin = 0;
  Reservation* reservation = FindReservation(address, &begin);
  if (reservation == nullptr || address + bytes > begin + reservation->bytes || bytes == 0 ||
      bytes % kGranularity != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (bytes != allocation->bytes) return CUDA_ERROR_NOT_SUPPORTED;
  for (const auto& [other, mapped] : reservation->mapped) {
    if (Overlap({other, mapped.bytes}, address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  }
  void* const place = reinterpret_cast<void*>(address + reservation->bytes);
  if (::mmap(place, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, allocation->fd, 0) !=
      place) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  reservation->mapped[address] = {bytes, std::move(allocation), {}, false};
  return CUDA_SUCCESS;
}

void UnmapAt(uintptr_t address) {
  Reservation* reservation = FindReservation(address);
  ::mmap(reinterpret_cast<void*>(address + reservation->bytes), reservation->mapped[address].bytes,
         PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  reservation->mapped.erase(address);
}

void FreeReservation(uintptr_t address) {
  const auto at = All().reservations.find(address);
  ::munmap(at->second.place, at->second.place_bytes);
  All().reservations.erase(at);
}

std::byte* Alias(uintptr_t address) {
  std::lock_guard lock(All().mutex);
  const Reservation* reservation = FindReservation(address);
  return reinterpret_cast<std::byte*>(reservation == nullptr ? address
                                                             : address + reservation->bytes);
}

}  // namespace dmuond::fake_cuda

using namespace dmuond::fake_cuda;  // NOLINT: the driver's interface is global

namespace {

// Unmaps and frees what MapWhole() made.
void FreeWhole(uintptr_t address) {
  UnmapAt(address);
  FreeReservation(address);
}

CUresult AllocateFor(const Context& context, CUdeviceptr* address, size_t bytes, bool pool) {
  if (bytes == 0 || bytes > (size_t{1} << 44)) {
    return bytes == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_OUT_OF_MEMORY;
  }
  bytes = (bytes + kGranularity - 1) / kGranularity * kGranularity;
  std::lock_guard lock(All().mutex);
  std::shared_ptr<Allocation> allocation;
  CUresult result = MakeAllocation(bytes, context.device, &allocation);
  if (result != CUDA_SUCCESS) return result;
  allocation->pool = pool;
  uintptr_t place = 0;
  Mapped* mapped = MapWhole(bytes, allocation, &place, &result);
  if (mapped == nullptr) return result;
  mapped->access.insert(context.device);
  *address = place;
  return CUDA_SUCCESS;
}

CUresult FreeLegacy(CUdeviceptr address, const char* call) {
  if (address == 0) return CUDA_SUCCESS;
  std::lock_guard lock(All().mutex);
  uintptr_t begin = 0;
  const Mapped* mapped = FindMapped(address, &begin);
  if (mapped == nullptr || !mapped->legacy || begin != address) return CUDA_ERROR_INVALID_VALUE;
  MustBeIdle(begin, mapped->bytes, call);
  FreeWhole(begin);
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

void* fakeCudaAlias(const void* address) { return Alias(reinterpret_cast<uintptr_t>(address)); }
void fakeCudaLogCall(const char* name) { LogCall(name); }

// ---- Address ranges and descriptors ----

CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp* properties,
                                       CUmemAllocationGranularity_flags) {
  if (const CUresult result = NeedDevice(properties->location.id); result != CUDA_SUCCESS) {
    return result;
  }
  *bytes = kGranularity;
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes,
                     const CUmemAllocationProp* properties, unsigned long long) {
  LogCall("cuMemCreate");
  if (const CUresult result = NeedDevice(properties->location.id); result != CUDA_SUCCESS) {
    return result;
  }
  if (bytes == 0 || bytes % kGranularity != 0 ||
      properties->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (dmuond::fault::FaultPoint("cuda.create") != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  State& all = All();
  std::lock_guard lock(all.mutex);
  std::shared_ptr<Allocation> allocation;
  const CUresult result = MakeAllocation(bytes, properties->location.id, &allocation);
  if (result != CUDA_SUCCESS) return result;
  *handle = all.next_handle++;
  all.handles[*handle] = std::move(allocation);
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  if (const CUresult result = NeedDriver(); result != CUDA_SUCCESS) return result;
  std::lock_guard lock(All().mutex);
  return All().handles.erase(handle) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* properties,
                                                CUmemGenericAllocationHandle handle) {
  if (const CUresult result = NeedDriver(); result != CUDA_SUCCESS) return result;
  std::lock_guard lock(All().mutex);
  const auto at = All().handles.find(handle);
  if (at == All().handles.end()) return CUDA_ERROR_INVALID_VALUE;
  *properties = {};
  properties->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties->requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties->location.id = at->second->device;
  return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void* fd, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long) {
  if (const CUresult result = NeedDriver(); result != CUDA_SUCCESS) return result;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(All().mutex);
  const auto at = All().handles.find(handle);
  if (at == All().handles.end()) return CUDA_ERROR_INVALID_VALUE;
  // For reading: who takes it for memory of the host and maps it for writing is refused.
  const int exported = ::open(PathOf(::getpid(), at->second->fd).c_str(), O_RDONLY | O_CLOEXEC);
  if (exported < 0 || ::flock(exported, LOCK_SH) != 0) return CUDA_ERROR_OPERATING_SYSTEM;
  *static_cast<int*>(fd) = exported;
  return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* fd,
                                        CUmemAllocationHandleType type) {
  if (const CUresult result = NeedDriver(); result != CUDA_SUCCESS) return result;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  State& all = All();
  std::lock_guard lock(all.mutex);
  std::shared_ptr<Allocation> allocation =
      Open(PathOf(::getpid(), static_cast<int>(reinterpret_cast<intptr_t>(fd))));
  if (allocation == nullptr) return CUDA_ERROR_UNKNOWN;
  *handle = all.next_handle++;
  all.handles[*handle] = std::move(allocation);
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr,
                             unsigned long long) {
  if (const CUresult result = NeedDriver(); result != CUDA_SUCCESS) return result;
  std::lock_guard lock(All().mutex);
  uintptr_t place = 0;
  const CUresult result = Reserve(bytes, alignment, &place);
  if (result == CUDA_SUCCESS) *address = place;
  return result;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  if (const CUresult result = NeedDriver(); result != CUDA_SUCCESS) return result;
  std::lock_guard lock(All().mutex);
  const auto at = All().reservations.find(address);
  if (at == All().reservations.end() || at->second.bytes != bytes || !at->second.mapped.empty()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  FreeReservation(address);
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long) {
  LogCall("cuMemMap");
  if (const CUresult result = NeedDriver(); result != CUDA_SUCCESS) return result;
  if (offset != 0) return CUDA_ERROR_INVALID_VALUE;
  if (dmuond::fault::FaultPoint("cuda.map") != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard lock(All().mutex);
  const auto at = All().handles.find(handle);
  if (at == All().handles.end()) return CUDA_ERROR_INVALID_VALUE;
  return MapAt(address, bytes, at->second);
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  LogCall("cuMemUnmap");
  if (const CUresult result = NeedDriver(); result != CUDA_SUCCESS) return result;
  std::lock_guard lock(All().mutex);
  uintptr_t begin = 0;
  const Mapped* mapped = FindMapped(address, &begin);
  if (mapped == nullptr || begin != address || mapped->bytes != bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  MustBeIdle(address, bytes, "cuMemUnmap");
  UnmapAt(address);
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access,
                        size_t count) {
  if (const CUresult result = NeedDriver(); result != CUDA_SUCCESS) return result;
  std::lock_guard lock(All().mutex);
  std::vector<Mapped*> pieces;  // one after the other, all of the range
  for (size_t done = 0; done < bytes; done += pieces.back()->bytes) {
    uintptr_t begin = 0;
    Mapped* mapped = FindMapped(address + done, &begin);
    if (mapped == nullptr || begin != address + done || mapped->bytes > bytes - done) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    pieces.push_back(mapped);
  }
  for (size_t i = 0; i < count; ++i) {
    const int device = access[i].location.id;
    if (access[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || device < 0 ||
        device >= All().settings.devices) {
      return CUDA_ERROR_INVALID_DEVICE;
    }
    for (Mapped* mapped : pieces) {
      if (device != mapped->allocation->device && !All().settings.peers) {
        return CUDA_ERROR_INVALID_DEVICE;
      }
      if (access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
        mapped->access.insert(device);
      } else {
        mapped->access.erase(device);
      }
    }
  }
  return CUDA_SUCCESS;
}

// ---- Memory of one process ----

CUresult cuMemGetInfo(size_t* free_bytes, size_t* total) {
  Context* context = nullptr;
  if (const CUresult result = NeedContext(&context); result != CUDA_SUCCESS) return result;
  std::lock_guard lock(All().mutex);
  *total = All().settings.memory_bytes;
  *free_bytes = *total - UsedBytes(context->device);
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr* address, size_t bytes) {
  LogCall("cuMemAlloc");
  Context* context = nullptr;
  if (const CUresult result = NeedContext(&context); result != CUDA_SUCCESS) return result;
  return AllocateFor(*context, address, bytes, /*pool=*/false);
}

CUresult cuMemAllocAsync(CUdeviceptr* address, size_t bytes, CUstream) {
  LogCall("cuMemAllocAsync");
  Context* context = nullptr;
  if (const CUresult result = NeedContext(&context); result != CUDA_SUCCESS) return result;
  return AllocateFor(*context, address, bytes, /*pool=*/true);
}

CUresult cuMemFree(CUdeviceptr address) {
  LogCall("cuMemFree");
  Context* context = nullptr;
  if (const CUresult result = NeedContext(&context); result != CUDA_SUCCESS) return result;
  return FreeLegacy(address, "cuMemFree");
}

CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
  if (const CUresult result = NeedDriver(); result != CUDA_SUCCESS) return result;
  std::lock_guard lock(All().mutex);
  uintptr_t begin = 0;
  const Mapped* mapped = FindMapped(address, &begin);
  // What no device may use is not found, although it is mapped.
  if (mapped == nullptr || (!mapped->legacy && mapped->access.empty())) return CUDA_ERROR_NOT_FOUND;
  if (base != nullptr) *base = begin;
  if (bytes != nullptr) *bytes = mapped->bytes;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  if (const CUresult result = NeedDriver(); result != CUDA_SUCCESS) return result;
  std::lock_guard lock(All().mutex);
  const int owner = OwnerOf(address);
  if (owner < 0 && !IsPinned(address, 1)) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(value) = owner < 0 ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(value) = std::max(owner, 0);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      *static_cast<unsigned long long*>(value) =
          owner < 0 ? 0 : FindMapped(address)->allocation->inode;
      return CUDA_SUCCESS;
    default:
      Abort("pointer attribute %d is not in this driver yet", static_cast<int>(attribute));
  }
}

// ---- Memory of the host ----

CUresult cuMemHostAlloc(void** address, size_t bytes, unsigned) {
  LogCall("cuMemHostAlloc");
  Context* context = nullptr;
  if (const CUresult result = NeedContext(&context); result != CUDA_SUCCESS) return result;
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  void* place = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (place == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  std::memset(place, 0xCD, bytes);  // the driver promises nothing
  std::lock_guard lock(All().mutex);
  All().host[reinterpret_cast<uintptr_t>(place)] = {bytes, true};
  *address = place;
  return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void* address) {
  LogCall("cuMemFreeHost");
  Context* context = nullptr;
  if (const CUresult result = NeedContext(&context); result != CUDA_SUCCESS) return result;
  std::lock_guard lock(All().mutex);
  const auto at = All().host.find(reinterpret_cast<uintptr_t>(address));
  if (at == All().host.end() || !at->second.allocated) return CUDA_ERROR_INVALID_VALUE;
  MustBeIdle(at->first, at->second.bytes, "cuMemFreeHost");
  ::munmap(address, at->second.bytes);
  All().host.erase(at);
  return CUDA_SUCCESS;
}

CUresult cuMemHostRegister(void* address, size_t bytes, unsigned) {
  LogCall("cuMemHostRegister");
  Context* context = nullptr;
  if (const CUresult result = NeedContext(&context); result != CUDA_SUCCESS) return result;
  std::lock_guard lock(All().mutex);
  const auto begin = reinterpret_cast<uintptr_t>(address);
  for (const auto& [other, range] : All().host) {
    if (Overlap({other, range.bytes}, begin, bytes)) {
      return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    }
  }
  All().host[begin] = {bytes, false};
  return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void* address) {
  Context* context = nullptr;
  if (const CUresult result = NeedContext(&context); result != CUDA_SUCCESS) return result;
  std::lock_guard lock(All().mutex);
  const auto at = All().host.find(reinterpret_cast<uintptr_t>(address));
  if (at == All().host.end() || at->second.allocated) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  MustBeIdle(at->first, at->second.bytes, "cuMemHostUnregister");
  All().host.erase(at);
  return CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr* device, void* address, unsigned) {
  Context* context = nullptr;
  if (const CUresult result = NeedContext(&context); result != CUDA_SUCCESS) return result;
  std::lock_guard lock(All().mutex);
  if (!IsPinned(reinterpret_cast<uintptr_t>(address), 1)) return CUDA_ERROR_INVALID_VALUE;
  *device = reinterpret_cast<CUdeviceptr>(address);
  return CUDA_SUCCESS;
}

// ---- 64-byte handles ----

CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
  Context* context = nullptr;
  if (const CUresult result = NeedContext(&context); result != CUDA_SUCCESS) return result;
  std::lock_guard lock(All().mutex);
  const Mapped* mapped = FindMapped(address);
  if (mapped == nullptr || !mapped->legacy || mapped->allocation->pool) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const Allocation& allocation = *mapped->allocation;
  HandleBytes bytes{{}, ::getpid(), allocation.fd, allocation.inode, allocation.bytes};
  std::memcpy(bytes.magic, kMagic, sizeof(kMagic));
  *handle = {};
  std::memcpy(handle, &bytes, sizeof(bytes));
  return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr* address, CUipcMemHandle handle, unsigned) {
  LogCall("cuIpcOpenMemHandle");
  Context* context = nullptr;
  if (const CUresult result = NeedContext(&context); result != CUDA_SUCCESS) return result;
  HandleBytes bytes{};
  std::memcpy(&bytes, &handle, sizeof(bytes));
  if (std::memcmp(bytes.magic, kMagic, sizeof(kMagic)) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (bytes.pid == ::getpid()) return CUDA_ERROR_INVALID_CONTEXT;
  State& all = All();
  std::lock_guard lock(all.mutex);
  OpenedHandle& opened = all.opened[{bytes.pid, bytes.inode}];
  if (opened.count == 0) {
    const std::shared_ptr<Allocation> allocation = Open(PathOf(bytes.pid, bytes.fd));
    if (allocation == nullptr || allocation->inode != bytes.inode) {
      all.opened.erase({bytes.pid, bytes.inode});
      return CUDA_ERROR_INVALID_HANDLE;
    }
    uintptr_t place = 0;
    CUresult result = CUDA_SUCCESS;
    Mapped* mapped = MapWhole(bytes.bytes, allocation, &place, &result);
    if (mapped == nullptr) return result;
    mapped->access.insert(context->device);
    opened.base = place;
  }
  ++opened.count;
  *address = opened.base;
  return CUDA_SUCCESS;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
  Context* context = nullptr;
  if (const CUresult result = NeedContext(&context); result != CUDA_SUCCESS) return result;
  std::lock_guard lock(All().mutex);
  auto& opened = All().opened;
  for (auto at = opened.begin(); at != opened.end(); ++at) {
    if (at->second.base != address) continue;
    if (--at->second.count > 0) return CUDA_SUCCESS;
    MustBeIdle(address, FindMapped(address)->bytes, "cuIpcCloseMemHandle");
    FreeWhole(address);
    opened.erase(at);
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

}  // extern "C"
