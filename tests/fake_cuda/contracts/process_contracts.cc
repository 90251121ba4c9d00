// Legacy handles, contexts, and what becomes of things when processes and devices fail.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>

#include "tests/fake_cuda/contracts/contract.h"

namespace dmuond::contracts {
namespace {

constexpr size_t kBytes = 8 * kMiB;

std::string Bytes(const void* value, size_t bytes) {
  return {static_cast<const char*>(value), bytes};
}

// A process with memory of cuMemAlloc: word i holds `value`, from 1 MiB on value + 1. Sends the
// handle of an address within it, and the offset of that address in the allocation.
struct Exporter {
  // The last device's number, asked in another process.
  static int Last() {
    Child counter([](Channel& parent) { parent.Send(std::to_string(Devices() - 1)); });
    return std::stoi(counter.channel().Receive());
  }
  explicit Exporter(uint32_t value, int device = 0)
      : child([value, device](Channel& parent) {
          UseContext(device);
          CUdeviceptr memory = 0;
          MUST(cuMemAlloc, &memory, kBytes);
          Set(memory, kMiB, value);
          Set(memory + kMiB, kBytes - kMiB, value + 1);
          CUipcMemHandle handle{};
          MUST(cuIpcGetMemHandle, &handle, memory + kMiB);
          CUdeviceptr base = 0;
          size_t size = 0;
          MUST(cuMemGetAddressRange, &base, &size, memory + kMiB);
          const uint64_t offset = memory + kMiB - base;
          parent.Send(Bytes(&handle, sizeof(handle)) + Bytes(&offset, sizeof(offset)));
          parent.Receive();
          MUST(cuMemFree, memory);
          parent.Send("freed");
          ::pause();
        }) {}
  void Take() {
    const std::string message = child.channel().Receive();
    std::memcpy(&handle, message.data(), sizeof(handle));
    std::memcpy(&offset, message.data() + sizeof(handle), sizeof(offset));
  }
  CUdeviceptr Open() const {
    CUdeviceptr base = 0;
    MUST(cuIpcOpenMemHandle, &base, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    return base;
  }
  Child child;
  CUipcMemHandle handle{};
  uint64_t offset = 0;
};

CONTRACT(
    handles_are_of_allocations,
    "the 64-byte handle of an address is that of its whole allocation: opened, it is the base") {
  Exporter exporter(60);
  exporter.Take();
  UseContext();
  const CUdeviceptr base = exporter.Open();
  std::string word;
  if (!All(base + exporter.offset, kBytes - kMiB, 61, &word))
    return Fails("at the offset: " + word);
  if (!All(base + exporter.offset - kMiB, kMiB, 60, &word)) return Fails("before it: " + word);
  CUdeviceptr whole = 0;
  size_t size = 0;
  MUST(cuMemGetAddressRange, &whole, &size, base + exporter.offset);
  const std::string seen =
      Text("offset %zu, the opened range has %zu bytes, base aligned to %zu",
           static_cast<size_t>(exporter.offset), size, static_cast<size_t>(base & -base));
  return whole == base && size >= kBytes ? Holds(seen) : Fails(seen);
}

CONTRACT(handles_open_once_a_process,
         "a handle that this process has open is opened again at the same address, or refused") {
  Exporter exporter(62);
  exporter.Take();
  UseContext();
  const CUdeviceptr first = exporter.Open();
  CUdeviceptr second = 0;
  const CUresult again =
      CU(cuIpcOpenMemHandle)(&second, exporter.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
  if (again != CUDA_SUCCESS) return Holds("second: " + Name(again));
  MUST(cuIpcCloseMemHandle, second);
  std::string word;
  const bool stays = All(first + exporter.offset, 4096, 63, &word);
  const std::string seen =
      Text("second at %s address; after one close %s", first == second ? "the same" : "another",
           stays ? "still open" : "gone");
  return first == second && stays ? Holds(seen) : Fails(seen);
}

CONTRACT(own_handles_are_refused, "a process cannot open its own handle") {
  UseContext();
  CUdeviceptr memory = 0;
  MUST(cuMemAlloc, &memory, kBytes);
  CUipcMemHandle handle{};
  MUST(cuIpcGetMemHandle, &handle, memory);
  CUdeviceptr opened = 0;
  const CUresult result =
      CU(cuIpcOpenMemHandle)(&opened, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
  return result != CUDA_SUCCESS ? Holds(Name(result)) : Fails("it can");
}

CONTRACT(mapped_memory_has_no_handle, "memory of cuMemMap has no 64-byte handle") {
  UseContext();
  CUipcMemHandle handle{};
  const CUresult result = CU(cuIpcGetMemHandle)(&handle, Map(Make(kBytes), kBytes));
  return result != CUDA_SUCCESS ? Holds(Name(result)) : Fails("it has");
}

CONTRACT(mapped_memory_has_the_range_of_one_piece,
         "of memory that cuMemMap has put together the range is that of the piece at the address, "
         "and there is none before somebody may use it; no piece has a 64-byte handle") {
  UseContext();
  const size_t piece = Granularity();
  CUdeviceptr begin = 0;
  MUST(cuMemAddressReserve, &begin, 3 * piece, 0, 0, 0);
  for (int i = 0; i < 3; ++i) MUST(cuMemMap, begin + i * piece, piece, 0, Make(piece), 0);
  CUdeviceptr base = 0;
  size_t size = 0;
  const CUresult unused = CU(cuMemGetAddressRange)(&base, &size, begin);
  if (unused != CUDA_ERROR_NOT_FOUND) return Fails("before: " + Name(unused));
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, 0},
                               CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  MUST(cuMemSetAccess, begin, 3 * piece, &access, 1);
  MUST(cuMemGetAddressRange, &base, &size, begin + piece + 4096);
  CUipcMemHandle handle{};
  const CUresult exported = CU(cuIpcGetMemHandle)(&handle, begin + piece + 4096);
  const std::string seen = Text("%zu bytes from %zu on; handle: %s", size,
                                static_cast<size_t>(base - begin), Name(exported).c_str());
  const bool as_said = base == begin + piece && size == piece && exported != CUDA_SUCCESS;
  return as_said ? Holds(seen) : Fails(seen);
}

CONTRACT(pool_memory_has_no_handle, "memory of cuMemAllocAsync has no 64-byte handle") {
  UseContext();
  CUstream stream = MakeStream();
  CUdeviceptr memory = 0;
  MUST(cuMemAllocAsync, &memory, kBytes, stream);
  MUST(cuStreamSynchronize, stream);
  CUipcMemHandle handle{};
  const CUresult result = CU(cuIpcGetMemHandle)(&handle, memory);
  return result != CUDA_SUCCESS ? Holds(Name(result)) : Fails("it has");
}

CONTRACT(invented_handles_are_refused, "64 bytes that are no handle are refused by an error") {
  UseContext();
  CUipcMemHandle handle{};
  std::string seen;
  for (const int byte : {0, 0xA5}) {
    std::memset(&handle, byte, sizeof(handle));
    CUdeviceptr opened = 0;
    const CUresult result =
        CU(cuIpcOpenMemHandle)(&opened, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    if (result == CUDA_SUCCESS) return Fails("they are taken");
    seen += (seen.empty() ? "" : ", ") + Name(result);
  }
  return Holds(seen);
}

CONTRACT(
    opened_memory_outlives_its_exporter,
    "memory opened by handle stays readable and writable after its exporter was killed, and is "
    "closed then") {
  Exporter exporter(64);
  exporter.Take();
  UseContext();
  const CUdeviceptr base = exporter.Open();
  exporter.child.Kill();
  std::string word;
  if (!All(base + exporter.offset, kBytes - kMiB, 65, &word)) return Fails(word);
  Set(base + exporter.offset, 4096, 66);
  if (!All(base + exporter.offset, 4096, 66, &word)) return Fails(word);
  MUST(cuIpcCloseMemHandle, base);
  return Holds();
}

CONTRACT(handles_of_peers_are_opened,
         "memory of another device is opened in this one's context, for copies and for kernels") {
  if (Exporter::Last() == 0) return Skipped("needs two devices");
  Exporter exporter(73, /*device=*/1);
  exporter.Take();
  UseContext();
  const CUdeviceptr base = exporter.Open();
  int owner = -1;
  MUST(cuPointerGetAttribute, &owner, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, base);
  CUstream stream = MakeStream();
  Store(stream, base + exporter.offset, uint64_t{76} << 32 | 76);
  MUST(cuStreamSynchronize, stream);
  std::string word;
  const bool right = All(base + exporter.offset, 8, 76, &word) &&
                     All(base + exporter.offset + 8, kBytes - kMiB - 8, 74, &word);
  return right ? Holds(Text("memory of device %d", owner)) : Fails(word);
}

CONTRACT(freed_memory_stays_open,
         "memory opened by handle stays usable after its exporter freed it") {
  Exporter exporter(67);
  exporter.Take();
  UseContext();
  const CUdeviceptr base = exporter.Open();
  exporter.child.channel().Send("free");
  exporter.child.channel().Receive();
  std::string word;
  if (!All(base + exporter.offset, kBytes - kMiB, 68, &word)) return Fails(word);
  MUST(cuIpcCloseMemHandle, base);
  return Holds();
}

CONTRACT(handles_of_the_dead_are_refused, "a handle cannot be opened once its exporter has ended") {
  Exporter exporter(69);
  exporter.Take();
  exporter.child.Kill();
  UseContext();
  CUdeviceptr base = 0;
  const CUresult result =
      CU(cuIpcOpenMemHandle)(&base, exporter.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
  return result != CUDA_SUCCESS ? Holds(Name(result)) : Fails("it can");
}

// ---- Unmapping under queued work: the product never does it, and must know what would happen.
// ----

constexpr char kFakeEnds[] = "the fake driver ends the process";

// A copy from `memory` is queued behind a gate; whether `end` returns before the gate opens, and
// what becomes of the copy.
template <typename End>
std::string UnderQueuedWork(CUdeviceptr memory, End end, bool* waits) {
  uint64_t* host = Pinned(kBytes);
  CUstream stream = MakeStream();
  Gate gate;
  gate.Close(stream);
  MUST(cuMemcpyAsync, At(host), memory, kBytes, stream);
  gate.OpenAfter(300);
  const CUresult result = end();
  *waits = gate.open();
  const CUresult after = CU(cuStreamSynchronize)(stream);
  const uint64_t word = host[kBytes / 8 - 1];
  return Text("%s, %s; the copy: %s, its last word %#llx", *waits ? "waits" : "does not wait",
              Name(result).c_str(), Name(after).c_str(), static_cast<unsigned long long>(word));
}

CONTRACT(freeing_waits, "cuMemFree waits for work that is queued") {
  if (IsFake()) return Skipped(kFakeEnds);
  UseContext();
  CUdeviceptr memory = 0;
  MUST(cuMemAlloc, &memory, kBytes);
  Set(memory, kBytes, 70);
  bool waits = false;
  const std::string seen = UnderQueuedWork(
      memory, [&] { return CU(cuMemFree)(memory); }, &waits);
  return waits ? Holds(seen) : Fails(seen);
}

CONTRACT(closing_waits, "cuIpcCloseMemHandle waits for work that is queued") {
  if (IsFake()) return Skipped(kFakeEnds);
  Exporter exporter(71);
  exporter.Take();
  UseContext();
  const CUdeviceptr base = exporter.Open();
  bool waits = false;
  const std::string seen = UnderQueuedWork(
      base, [&] { return CU(cuIpcCloseMemHandle)(base); }, &waits);
  return waits ? Holds(seen) : Fails(seen);
}

CONTRACT(unmapping_does_not_wait,
         "cuMemUnmap does not wait: queued work that uses the memory fails") {
  if (IsFake()) return Skipped(kFakeEnds);
  UseContext();
  const CUdeviceptr memory = Map(Make(kBytes), kBytes);
  Set(memory, kBytes, 72);
  bool waits = false;
  const std::string seen = UnderQueuedWork(
      memory, [&] { return CU(cuMemUnmap)(memory, kBytes); }, &waits);
  return waits ? Fails(seen) : Holds(seen);
}

// ---- Contexts ----

CONTRACT(primary_context_is_one, "the primary context is the same for every one who retains it") {
  const CUcontext first = UseContext();
  const CUcontext second = UseContext();
  CUdevice device = -1;
  MUST(cuCtxGetDevice, &device);
  return first == second && device == 0 ? Holds() : Fails("it is not");
}

CONTRACT(threads_have_no_context, "a new thread has no context, and is told so") {
  UseContext();
  CUresult result = CUDA_SUCCESS;
  std::thread([&] {
    CUstream stream = nullptr;
    result = CU(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING);
  }).join();
  return result == CUDA_ERROR_INVALID_CONTEXT ? Holds() : Fails(Name(result));
}

CONTRACT(forked_children_have_no_driver,
         "a child forked after the driver was initialised is refused, and does not hang") {
  UseContext();
  int ends[2];
  if (::pipe(ends) != 0) return Fails("pipe");
  const pid_t pid = ::fork();
  if (pid == 0) {
    CUstream stream = nullptr;
    const CUresult results[2] = {CU(cuInit)(0), CU(cuStreamCreate)(&stream, 0)};
    ::_exit(::write(ends[1], results, sizeof(results)) > 0 ? 0 : 1);
  }
  ::close(ends[1]);
  CUresult results[2] = {};
  if (::read(ends[0], results, sizeof(results)) != sizeof(results)) return Fails("no answer");
  ::waitpid(pid, nullptr, 0);
  const std::string seen =
      Text("cuInit: %s, cuStreamCreate: %s", Name(results[0]).c_str(), Name(results[1]).c_str());
  return results[1] != CUDA_SUCCESS ? Holds(seen) : Fails(seen);
}

CONTRACT(uuids_are_the_same_everywhere, "a device has the same uuid in every process") {
  Child other([](Channel& parent) {
    Devices();
    CUuuid uuid{};
    MUST(cuDeviceGetUuid, &uuid, 0);
    parent.Send(Bytes(&uuid, sizeof(uuid)));
  });
  Devices();
  CUuuid uuid{};
  MUST(cuDeviceGetUuid, &uuid, 0);
  return other.channel().Receive() == Bytes(&uuid, sizeof(uuid)) ? Holds() : Fails("it has not");
}

CONTRACT(hidden_devices_are_not_counted, "CUDA_VISIBLE_DEVICES chooses and numbers the devices") {
  Child other([](Channel& parent) {
    const int count = Devices();
    CUuuid uuid{};
    MUST(cuDeviceGetUuid, &uuid, count - 1);
    parent.Send(static_cast<char>(count) + Bytes(&uuid, sizeof(uuid)));
  });
  const std::string all = other.channel().Receive();
  const int last = all[0] - 1;
  ::setenv("CUDA_VISIBLE_DEVICES", std::to_string(last).c_str(), 1);
  const int count = Devices();
  CUuuid uuid{};
  MUST(cuDeviceGetUuid, &uuid, 0);
  const bool same = all.substr(1) == Bytes(&uuid, sizeof(uuid));
  return count == 1 && same ? Holds() : Fails(Text("%d devices, uuid the same %d", count, same));
}

// ---- Failures ----

CONTRACT(
    errors_of_kernels_stay,
    "after an illegal access every call of the context fails, and making memory too; a process "
    "without a context goes on") {
  Child holder([](Channel& parent) {
    Devices();
    const CUmemGenericAllocationHandle handle = Make(kBytes);
    parent.Send("made", Export(handle));
    parent.Receive();
    const int second = Export(Make(kBytes));
    parent.Send("made", second);
    ::pause();
  });
  int fd = -1;
  holder.channel().Receive(&fd);
  UseContext();
  CUstream stream = MakeStream();
  CUevent event = MakeEvent();
  Store(stream, 8, 1);
  const CUresult sync = CU(cuStreamSynchronize)(stream);
  const CUresult query = CU(cuEventQuery)(event);
  const CUresult record = CU(cuEventRecord)(event, stream);
  CUmemGenericAllocationHandle handle = 0;
  const CUmemAllocationProp properties = Properties();
  const CUresult create = CU(cuMemCreate)(&handle, kBytes, &properties, 0);
  holder.channel().Send("again");
  holder.channel().Receive(&fd);
  const std::string seen =
      Text("synchronize: %s, query: %s, record: %s, create: %s", Name(sync).c_str(),
           Name(query).c_str(), Name(record).c_str(), Name(create).c_str());
  return sync == CUDA_ERROR_ILLEGAL_ADDRESS && query == sync && record == sync ? Holds(seen)
                                                                               : Fails(seen);
}

CONTRACT(
    memory_survives_errors,
    "memory held elsewhere keeps its bytes when a process that maps it ends by an illegal access") {
  Child holder([](Channel& parent) {
    Devices();
    parent.Send("made", Export(Make(kBytes)));
    ::pause();
  });
  int fd = -1;
  holder.channel().Receive(&fd);
  Child user([fd](Channel& parent) {
    UseContext();
    Set(Map(Import(fd), kBytes), kBytes, 80);
    CUstream stream = MakeStream();
    Store(stream, 8, 1);
    parent.Send(Name(CU(cuStreamSynchronize)(stream)));
    ::_exit(3);
  });
  const std::string error = user.channel().Receive();
  user.Wait();
  UseContext();
  std::string word;
  return All(Map(Import(fd), kBytes), kBytes, 80, &word) ? Holds("the other: " + error)
                                                         : Fails(word);
}

// Another client of the same MPS server is still there for a second.
std::string ComesAfterAFault(bool another) {
  Child client([](Channel& parent) {
    UseContext();
    parent.Send("ready");
    parent.Receive();
    ::_exit(0);
  });
  Child faulty([](Channel& parent) {
    parent.Receive();
    UseContext();
    CUstream stream = MakeStream();
    Store(stream, 8, 1);
    parent.Send(Name(CU(cuStreamSynchronize)(stream)));
    ::_exit(3);
  });
  Child next([](Channel& parent) {
    parent.Receive();
    const NotReady seen = Initialise();
    UseContext();
    Set(Map(Make(kBytes), kBytes), kBytes, 82);
    std::string text = Text("within %.0f ms", seen.milliseconds);
    for (const auto& [error, times] : seen.errors) {
      text += Text(", after %d times %s", times, Name(error).c_str());
    }
    parent.Send(text);
  });
  client.channel().Receive();
  if (!another) client.Kill();
  faulty.channel().Send("go");
  faulty.channel().Receive();
  next.channel().Send("go");
  if (another) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    client.channel().Send("end");
  }
  return next.channel().Receive();
}

CONTRACT(clients_come_after_a_fault,
         "after one client's illegal access a new process gets the driver, at once or by asking it "
         "again; MPS_SERVER_NOT_READY and MPS_CONNECTION_FAILED alone refuse it meanwhile") {
  const std::string alone = ComesAfterAFault(false);
  return Holds(alone + "; beside another client that ends after 1 s: " + ComesAfterAFault(true));
}

CONTRACT(functions_are_found_by_name,
         "the driver hands out its functions by name, and says which it does not have") {
  void* found = nullptr;
  CUdriverProcAddressQueryResult what{};
  MUST(cuGetProcAddress, "cuInit", &found, 12000, CU_GET_PROC_ADDRESS_DEFAULT, &what);
  if (found == nullptr || what != CU_GET_PROC_ADDRESS_SUCCESS) return Fails("it has no cuInit");
  const CUresult result =
      CU(cuGetProcAddress)("cuNone", &found, 12000, CU_GET_PROC_ADDRESS_DEFAULT, &what);
  return what == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND ? Holds("the other: " + Name(result))
                                                      : Fails("it has what there is not");
}

CONTRACT(memory_survives_kills,
         "a process that is killed while it copies leaves memory that others map and use") {
  Child holder([](Channel& parent) {
    Devices();
    parent.Send("made", Export(Make(8 * kBytes)));
    ::pause();
  });
  int fd = -1;
  holder.channel().Receive(&fd);
  Child user([fd](Channel& parent) {
    UseContext();
    const CUdeviceptr memory = Map(Import(fd), 8 * kBytes);
    uint64_t* host = Pinned(8 * kBytes);
    CUstream stream = MakeStream();
    for (int i = 0;; ++i) {
      MUST(cuMemcpyAsync, memory, At(host), 8 * kBytes, stream);
      if (i == 20) parent.Send("copies");
      if (i % 20 == 19) MUST(cuStreamSynchronize, stream);
    }
  });
  user.channel().Receive();
  const double start = NowMs();
  user.Kill();
  const double took = NowMs() - start;
  UseContext();
  const CUdeviceptr memory = Map(Import(fd), 8 * kBytes);
  Set(memory, 8 * kBytes, 81);
  std::string word;
  return All(memory, 8 * kBytes, 81, &word) ? Holds(Text("the end took %.0f ms", took))
                                            : Fails(word);
}

}  // namespace
}  // namespace dmuond::contracts
