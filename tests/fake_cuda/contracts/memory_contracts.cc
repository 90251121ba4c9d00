// Memory that is held by descriptor, as the daemon and its lanes use it.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include "tests/fake_cuda/contracts/contract.h"

namespace dmuond::contracts {
namespace {

constexpr size_t kBytes = 8 * kMiB;

CONTRACT(
    supports_what_is_needed,
    "the device has one address space with the host, memory by address range, descriptors, and "
    "waits on 64-bit words") {
  Devices();
  const struct {
    CUdevice_attribute attribute;
    const char* name;
  } needed[] = {
      {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, "unified addressing"},
      {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "memory by address range"},
      {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, "descriptors"},
      {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, "64-bit stream operations"},
      {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, "registered host pointers"}};
  for (const auto& one : needed) {
    if (Attribute(one.attribute) != 1) return Fails(Text("no %s", one.name));
  }
  return Holds(Text("flush of remote writes %d, copy engines %d, integrated %d",
                    Attribute(CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES),
                    Attribute(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT),
                    Attribute(CU_DEVICE_ATTRIBUTE_INTEGRATED)));
}

CONTRACT(granularity_is_two_mib, "memory comes in multiples of 2 MiB, which others refuse") {
  Devices();
  const CUmemAllocationProp properties = Properties();
  size_t least = 0;
  MUST(cuMemGetAllocationGranularity, &least, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  const size_t recommended = Granularity();
  CUmemGenericAllocationHandle handle = 0;
  const CUresult odd = CU(cuMemCreate)(&handle, recommended + 4096, &properties, 0);
  const std::string seen =
      Text("least %zu, recommended %zu, 4096 more: %s", least, recommended, Name(odd).c_str());
  const bool as_said =
      least == 2 * kMiB && recommended == 2 * kMiB && odd == CUDA_ERROR_INVALID_VALUE;
  return as_said ? Holds(seen) : Fails(seen);
}

CONTRACT(memory_needs_no_context,
         "memory is made, exported, imported and given an address without any context") {
  Devices();
  const int fd = Export(Make(kBytes));
  const CUmemGenericAllocationHandle again = Import(fd);
  const double start = NowMs();
  Unmap(Map(again, kBytes, -1), kBytes);
  const double map_ms = NowMs() - start;
  MUST(cuMemRelease, again);
  CUcontext current = nullptr;
  MUST(cuCtxGetCurrent, &current);
  unsigned flags = 0;
  int active = -1;
  MUST(cuDevicePrimaryCtxGetState, 0, &flags, &active);
  if (current != nullptr || active != 0) return Fails("a context has come into being");
  return Holds(Text("mapped and unmapped in %.2f ms", map_ms));
}

CONTRACT(memory_beside_mps_variable,
         "with CUDA_MPS_PIPE_DIRECTORY an empty folder, memory is made without a context") {
  char folder[] = "/tmp/contracts-XXXXXX";
  if (::mkdtemp(folder) == nullptr) return Fails("mkdtemp");
  ::setenv("CUDA_MPS_PIPE_DIRECTORY", folder, 1);
  Devices();
  const int mps = Attribute(CU_DEVICE_ATTRIBUTE_MPS_ENABLED);
  const int fd = Export(Make(kBytes));
  UseContext();  // and one that wants a context gets it, without MPS
  const CUdeviceptr address = Map(Import(fd), kBytes);
  Set(address, kBytes, 7);
  ::rmdir(folder);
  return mps == 0 ? Holds("a context too; MPS attribute 0") : Fails(Text("MPS attribute %d", mps));
}

CONTRACT(memory_is_zero_after_another_process,
         "memory that another process has written and freed reads as zero") {
  Child other([](Channel& parent) {
    UseContext();
    for (int i = 0; i < 4; ++i) {
      const CUmemGenericAllocationHandle handle = Make(8 * kBytes);
      Set(Map(handle, 8 * kBytes), 8 * kBytes, 0x5EC4E7);
    }
    parent.Send("written");
  });
  other.channel().Receive();
  other.Wait();
  UseContext();
  std::string word;
  for (int i = 0; i < 4; ++i) {
    if (!All(Map(Make(8 * kBytes), 8 * kBytes), 8 * kBytes, 0, &word)) return Fails(word);
  }
  return Holds("4 x 64 MiB");
}

CONTRACT(memory_is_zero_again_in_one_process,
         "memory that this process has written and freed reads as zero when it is made again") {
  UseContext();
  std::string word;
  for (int i = 0; i < 4; ++i) {
    const CUmemGenericAllocationHandle handle = Make(8 * kBytes);
    const CUdeviceptr address = Map(handle, 8 * kBytes);
    if (!All(address, 8 * kBytes, 0, &word)) return Fails(Text("time %d: %s", i, word.c_str()));
    Set(address, 8 * kBytes, 0x5EC4E7);
    Unmap(address, 8 * kBytes);
    MUST(cuMemRelease, handle);
  }
  return Holds("4 x 64 MiB");
}

CONTRACT(too_much_memory_is_refused, "memory that is not there is refused as out of memory") {
  Devices();
  const CUmemAllocationProp properties = Properties();
  CUmemGenericAllocationHandle handle = 0;
  const CUresult result = CU(cuMemCreate)(&handle, size_t{1} << 50, &properties, 0);
  return result == CUDA_ERROR_OUT_OF_MEMORY ? Holds() : Fails(Name(result));
}

CONTRACT(total_memory_needs_no_context, "a device's size can be asked for without a context") {
  Devices();
  size_t bytes = 0;
  MUST(cuDeviceTotalMem, &bytes, 0);
  size_t free_bytes = 0;
  size_t total = 0;
  const CUresult without = CU(cuMemGetInfo)(&free_bytes, &total);
  const std::string seen =
      Text("%zu MiB; cuMemGetInfo then: %s", bytes / kMiB, Name(without).c_str());
  return bytes > 0 && without == CUDA_ERROR_INVALID_CONTEXT ? Holds(seen) : Fails(seen);
}

CONTRACT(descriptors_keep_memory,
         "a descriptor alone keeps memory and what is in it; without one it is free at once") {
  UseContext();
  size_t before = 0;
  size_t held = 0;
  size_t after = 0;
  size_t total = 0;
  const size_t bytes = 256 * kMiB;
  MUST(cuMemGetInfo, &before, &total);
  CUmemGenericAllocationHandle handle = Make(bytes);
  const int fd = Export(handle);
  CUdeviceptr address = Map(handle, bytes);
  Set(address, bytes, 41);
  Unmap(address, bytes);
  MUST(cuMemRelease, handle);
  MUST(cuMemGetInfo, &held, &total);
  handle = Import(fd);
  address = Map(handle, bytes);
  std::string word;
  if (!All(address, bytes, 41, &word)) return Fails(word);
  Unmap(address, bytes);
  MUST(cuMemRelease, handle);
  ::close(fd);
  MUST(cuMemGetInfo, &after, &total);
  const std::string seen = Text("256 MiB made: %zd MiB less free, closed: %zd",
                                static_cast<ssize_t>(before - held) / static_cast<ssize_t>(kMiB),
                                static_cast<ssize_t>(before - after) / static_cast<ssize_t>(kMiB));
  return before - held >= bytes && before - after < bytes ? Holds(seen) : Fails(seen);
}

CONTRACT(mappings_keep_memory, "a mapping keeps memory when handle and descriptor are gone") {
  UseContext();
  const CUmemGenericAllocationHandle made = Make(kBytes);
  const int fd = Export(made);
  MUST(cuMemRelease, made);
  const CUmemGenericAllocationHandle handle = Import(fd);
  ::close(fd);
  const CUdeviceptr address = Map(handle, kBytes);
  MUST(cuMemRelease, handle);
  Set(address, kBytes, 42);
  std::string word;
  return All(address, kBytes, 42, &word) ? Holds() : Fails(word);
}

CONTRACT(mappings_show_the_same_bytes, "two mappings of one descriptor show the same bytes") {
  UseContext();
  const int fd = Export(Make(kBytes));
  const CUdeviceptr first = Map(Import(fd), kBytes);
  const CUdeviceptr second = Map(Import(fd), kBytes);
  if (first == second) return Fails("both have the same address");
  Set(first, kBytes, 43);
  std::string word;
  return All(second, kBytes, 43, &word) ? Holds() : Fails(word);
}

CONTRACT(memory_outlives_its_maker,
         "memory is imported after the process that made and wrote it was killed by SIGKILL") {
  Child maker([](Channel& parent) {
    UseContext();
    const CUmemGenericAllocationHandle handle = Make(kBytes);
    Set(Map(handle, kBytes), kBytes, 44);
    parent.Send("written", Export(handle));
    ::pause();
  });
  int fd = -1;
  maker.channel().Receive(&fd);
  maker.Kill();
  UseContext();
  std::string word;
  return All(Map(Import(fd), kBytes), kBytes, 44, &word) ? Holds() : Fails(word);
}

CONTRACT(strangers_hold_memory,
         "a process that never initialised the driver holds and passes descriptors; their maker is "
         "dead by then") {
  Child maker([](Channel& parent) {
    UseContext();
    const CUmemGenericAllocationHandle handle = Make(kBytes);
    Set(Map(handle, kBytes), kBytes, 45);
    parent.Send("written", Export(handle));
  });
  Child user([](Channel& parent) {
    int fd = -1;
    parent.Receive(&fd);
    UseContext();
    std::string word = "right";
    if (!All(Map(Import(fd), kBytes), kBytes, 45, &word)) throw Broken{word};
    parent.Send(word);
  });
  int fd = -1;
  maker.channel().Receive(&fd);
  maker.Wait();
  user.channel().Send("here", fd);
  ::close(fd);
  user.channel().Receive();
  return Holds();
}

CONTRACT(descriptors_close_on_exec, "an exported descriptor is closed by exec") {
  Devices();
  const int fd = Export(Make(kBytes));
  struct stat status {};
  ::fstat(fd, &status);
  char path[64];
  char target[128] = {};
  std::snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
  const ssize_t length = ::readlink(path, target, sizeof(target) - 1);
  const bool closes = (::fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0;
  const std::string seen = Text("mode %#o, %s", status.st_mode, length > 0 ? target : "?");
  return closes ? Holds(seen) : Fails(seen);
}

CONTRACT(other_descriptors_are_refused, "a descriptor of something else is refused by an error") {
  Devices();
  const int memory = ::memfd_create("contracts", MFD_CLOEXEC);
  if (::ftruncate(memory, kBytes) != 0) return Fails("ftruncate");
  const int others[] = {memory, ::open("/dev/null", O_RDWR), 12345};
  std::string seen;
  for (const int fd : others) {
    CUmemGenericAllocationHandle handle = 0;
    const CUresult result = CU(cuMemImportFromShareableHandle)(
        &handle, reinterpret_cast<void*>(static_cast<intptr_t>(fd)),
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (result == CUDA_SUCCESS) return Fails("it was taken for memory");
    seen += (seen.empty() ? "" : ", ") + Name(result);
  }
  return Holds(seen);
}

CONTRACT(imported_memory_names_its_device, "imported memory says whose it is, without a context") {
  const int last = Devices() - 1;
  const CUmemGenericAllocationHandle handle = Import(Export(Make(kBytes, last)));
  CUmemAllocationProp properties{};
  MUST(cuMemGetAllocationPropertiesFromHandle, &properties, handle);
  const bool right =
      properties.location.type == CU_MEM_LOCATION_TYPE_DEVICE && properties.location.id == last;
  const std::string seen = Text("device %d of %d", properties.location.id, last + 1);
  return right ? Holds(seen) : Fails(seen);
}

CONTRACT(memory_is_mapped_whole,
         "an address range that is larger or smaller than the memory is refused") {
  Devices();
  const CUmemGenericAllocationHandle handle = Import(Export(Make(kBytes)));
  CUdeviceptr address = 0;
  MUST(cuMemAddressReserve, &address, 2 * kBytes, 0, 0, 0);
  const CUresult more = CU(cuMemMap)(address, 2 * kBytes, 0, handle, 0);
  const CUresult part = CU(cuMemMap)(address, kBytes / 2, 0, handle, 0);
  const std::string seen = Text("twice: %s, half: %s", Name(more).c_str(), Name(part).c_str());
  return more != CUDA_SUCCESS && part != CUDA_SUCCESS ? Holds(seen) : Fails(seen);
}

CONTRACT(descriptors_are_no_memory_of_the_host, "the host cannot map a descriptor for itself") {
  Devices();
  void* const mapped =
      ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, Export(Make(kBytes)), 0);
  return mapped == MAP_FAILED ? Holds(std::strerror(errno)) : Fails("it can");
}

CONTRACT(addresses_are_mapped_anew,
         "addresses whose memory was unmapped take other memory, which is used there") {
  UseContext();
  const CUdeviceptr address = Map(Make(kBytes), kBytes);
  Set(address, kBytes, 1);
  const CUmemGenericAllocationHandle other = Make(kBytes);
  const CUdeviceptr before = Map(other, kBytes);
  Set(before, kBytes, 2);
  MUST(cuCtxSynchronize);
  MUST(cuMemUnmap, address, kBytes);
  MUST(cuMemUnmap, before, kBytes);
  MUST(cuMemMap, address, kBytes, 0, other, 0);
  CUmemAccessDesc access{};
  access.location = Properties().location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  MUST(cuMemSetAccess, address, kBytes, &access, 1);
  std::string word;
  return All(address, kBytes, 2, &word) ? Holds() : Fails(word);
}

CONTRACT(device_addresses_are_not_the_hosts, "the host that reads a device address gets SIGSEGV") {
  UseContext();
  const CUdeviceptr address = Map(Make(kBytes), kBytes);
  const pid_t pid = ::fork();
  if (pid == 0) {
    std::signal(SIGSEGV, SIG_DFL);
    ::_exit(*reinterpret_cast<volatile char*>(address));
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV ? Holds()
                                                            : Fails(Text("status %#x", status));
}

CONTRACT(processes_share_memory,
         "what one process writes another one that has mapped it before reads") {
  Child writer([](Channel& parent) {
    int fd = -1;
    parent.Receive(&fd);
    UseContext();
    const CUdeviceptr address = Map(Import(fd), kBytes);
    parent.Send("mapped");
    parent.Receive();
    Set(address, kBytes, 49);
    parent.Send("written");
    ::pause();
  });
  UseContext();
  const CUmemGenericAllocationHandle handle = Make(kBytes);
  const CUdeviceptr address = Map(handle, kBytes);
  Set(address, kBytes, 1);
  writer.channel().Send("here", Export(handle));
  writer.channel().Receive();
  writer.channel().Send("write");
  writer.channel().Receive();
  std::string word;
  return All(address, kBytes, 49, &word) ? Holds() : Fails(word);
}

CONTRACT(mapped_ranges_must_be_unmapped_whole,
         "a mapping cannot be cut, and its addresses are not freed before it is unmapped") {
  UseContext();
  const CUdeviceptr address = Map(Make(kBytes), kBytes);
  const CUresult half = CU(cuMemUnmap)(address, kBytes / 2);
  const CUresult freed = CU(cuMemAddressFree)(address, kBytes);
  const std::string seen = Text("half: %s, free: %s", Name(half).c_str(), Name(freed).c_str());
  return half != CUDA_SUCCESS && freed != CUDA_SUCCESS ? Holds(seen) : Fails(seen);
}

CONTRACT(access_is_needed, "a copy into a mapping that no device may access is refused") {
  UseContext();
  const CUdeviceptr address = Map(Make(kBytes), kBytes, -1);
  CUstream stream = MakeStream();
  uint64_t* host = Pinned(4096);
  CUresult result = CU(cuMemcpyHtoDAsync)(address, host, 4096, stream);
  const std::string at_call = Name(result);
  if (result == CUDA_SUCCESS) result = CU(cuStreamSynchronize)(stream);
  const std::string seen = "call: " + at_call + ", then: " + Name(result);
  return result != CUDA_SUCCESS ? Holds(seen) : Fails(seen);
}

CONTRACT(mappings_made_before_a_context,
         "what was mapped before the context existed is used in it, once access is set") {
  Devices();
  const CUdeviceptr address = Map(Make(kBytes), kBytes, -1);
  CUmemAccessDesc allowed{};
  allowed.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  allowed.location.id = 0;
  allowed.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const CUresult early = CU(cuMemSetAccess)(address, kBytes, &allowed, 1);
  UseContext();
  if (early != CUDA_SUCCESS) MUST(cuMemSetAccess, address, kBytes, &allowed, 1);
  Set(address, kBytes, 46);
  std::string word;
  const bool right = All(address, kBytes, 46, &word);
  return right ? Holds("access without a context: " + Name(early)) : Fails(word);
}

CONTRACT(pointers_name_their_device, "the driver knows whose memory an address is") {
  UseContext();
  const CUdeviceptr address = Map(Make(kBytes), kBytes);
  unsigned type = 0;
  int ordinal = -1;
  MUST(cuPointerGetAttribute, &type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address + 4096);
  MUST(cuPointerGetAttribute, &ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address + 4096);
  uint64_t host = 0;
  const CUresult stranger =
      CU(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, At(&host));
  const std::string seen = Text("device %d; pageable memory: %s", ordinal, Name(stranger).c_str());
  return ordinal == 0 && stranger != CUDA_SUCCESS ? Holds(seen) : Fails(seen);
}

CONTRACT(peer_memory_is_mapped,
         "memory of another device, mapped with access for this one alone, is copied to and from") {
  if (Devices() < 2) return Skipped("needs two devices");
  int can = 0;
  MUST(cuDeviceCanAccessPeer, &can, 0, 1);
  if (can == 0) return Skipped("device 0 cannot access device 1");
  UseContext();
  const CUdeviceptr theirs = Map(Make(kBytes, 1), kBytes, 0);
  const CUdeviceptr ours = Map(Make(kBytes), kBytes);
  Set(ours, kBytes, 47);
  CUstream stream = MakeStream();
  MUST(cuMemcpyAsync, theirs, ours, kBytes, stream);
  MUST(cuStreamSynchronize, stream);
  Set(ours, kBytes, 0);
  MUST(cuMemcpyAsync, ours, theirs, kBytes, stream);
  MUST(cuStreamSynchronize, stream);
  std::string word;
  return All(ours, kBytes, 47, &word) ? Holds() : Fails(word);
}

CONTRACT(peer_copies_between_contexts,
         "cuMemcpyPeerAsync copies between two devices whose contexts do not know each other") {
  if (Devices() < 2) return Skipped("needs two devices");
  const CUcontext second = UseContext(1);
  const CUdeviceptr theirs = Map(Make(kBytes, 1), kBytes, 1);
  Set(theirs, kBytes, 48);
  const CUcontext first = UseContext(0);
  const CUdeviceptr ours = Map(Make(kBytes), kBytes);
  CUstream stream = MakeStream();
  MUST(cuMemcpyPeerAsync, ours, first, theirs, second, kBytes, stream);
  MUST(cuStreamSynchronize, stream);
  std::string word;
  return All(ours, kBytes, 48, &word) ? Holds() : Fails(word);
}

CONTRACT(peer_memory_needs_access,
         "a kernel that stores to another device's memory without access ends with an error") {
  if (Devices() < 2) return Skipped("needs two devices");
  UseContext(1);
  const CUdeviceptr theirs = Map(Make(kBytes, 1), kBytes, 1);
  UseContext(0);
  CUstream stream = MakeStream();
  Store(stream, theirs, 1);
  const CUresult result = CU(cuStreamSynchronize)(stream);
  return result == CUDA_ERROR_ILLEGAL_ADDRESS ? Holds(Name(result)) : Fails(Name(result));
}

}  // namespace
}  // namespace dmuond::contracts
