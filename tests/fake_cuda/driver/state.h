// The fake driver's state: devices, contexts, memory and streams of this process.
#ifndef DMUOND_TESTS_FAKE_CUDA_DRIVER_STATE_H_
#define DMUOND_TESTS_FAKE_CUDA_DRIVER_STATE_H_

#include <cuda.h>
#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/fake_cuda/driver/fake_cuda.h"

namespace dmuond::fake_cuda {

inline constexpr size_t kGranularity = size_t{2} << 20;

// Ends the process with the reason: the product has done what it must never do.
[[noreturn]] void Abort(const char* format, ...) __attribute__((format(printf, 1, 2)));

struct Settings {
  int devices = 1;
  size_t memory_bytes = 0;
  std::string name;
  int major = 9;
  int minor = 0;
  bool peers = true;
  bool mps = false;
  bool stream_ops = true;
  int compute_mode = 0;
  int64_t not_ready = 0;
  int version = CUDA_VERSION;
  int machine = 0;
  int delay_us = 50;
  uint64_t seed = 1;
  int64_t fault_kernel = 0;
  std::string no_context;
  std::string log;
  std::vector<int> visible;  // the machine's number of each device of this process
};

// ---- Memory ----

// Memory of one device. This process keeps it as long as it has a handle or a mapping of it; other
// processes may have it by descriptor.
struct Allocation {
  ~Allocation();
  int fd = -1;
  size_t bytes = 0;
  int device = 0;  // of this process
  ino_t inode = 0;
  bool pool = false;
};

struct Mapped {
  size_t bytes = 0;
  std::shared_ptr<Allocation> allocation;
  std::set<int> access;  // devices
  bool legacy = false;   // of cuMemAlloc: copies reach it from everywhere, kernels of peers too
};

// A range of addresses that no one may access. Workers find the bytes behind it: the place has room
// for twice as many.
struct Reservation {
  size_t bytes = 0;
  std::byte* place = nullptr;  // what munmap() takes
  size_t place_bytes = 0;
  std::map<uintptr_t, Mapped> mapped;
};

struct HostRange {
  size_t bytes = 0;
  bool allocated = false;  // else registered
};

struct OpenedHandle {
  CUdeviceptr base = 0;
  int count = 0;
};

// ---- Streams ----

struct Range {
  uintptr_t begin = 0;
  size_t bytes = 0;
};

enum class WorkKind : uint8_t { kKernel, kKernelBeside, kEngine, kWord, kOther };

// Says whether a record is done, or a copy that its call waits for.
struct Point {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  double ms = 0;
  void Finish();
  void Wait();
  bool Done();
};

struct Context;
struct Work {
  WorkKind kind = WorkKind::kOther;
  std::string name;
  size_t bytes = 0;
  std::vector<Range> ranges;
  // CUDA_SUCCESS, or what becomes the context's error.
  std::function<CUresult()> run;
  std::shared_ptr<Point> point;  // finished afterwards
};

class Stream {
 public:
  explicit Stream(Context* context);
  void Add(Work work);
  void Synchronize();
  [[nodiscard]] bool Empty();
  [[nodiscard]] Context* context() const { return context_; }
  void Destroy();  // work that is queued is done
  // While it is captured it takes no work: no graph could launch it.
  [[nodiscard]] bool captured() const { return captured_; }
  void SetCaptured(bool captured) { captured_ = captured; }
  static std::shared_ptr<Stream> Make(Context* context);

 private:
  void RunAll(const std::shared_ptr<Stream>& self);
  void Run(Work& work);

  Context* const context_;
  const int number_;
  std::atomic<bool> captured_{false};
  std::mt19937_64 random_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  bool busy_ = false;
  bool destroyed_ = false;
};

struct Event {
  Context* context = nullptr;
  bool timing = false;
  std::shared_ptr<Point> last;  // nullptr: never recorded
};

struct Context {
  int device = 0;
  int retained = 0;
  std::atomic<CUresult> error{CUDA_SUCCESS};  // never cleared
  std::shared_ptr<Stream> default_stream;
  std::set<int> peers;  // whose cuMemAlloc memory kernels reach
};

struct Device {
  std::mutex kernels;  // one at a time: each has the whole device
  std::unique_ptr<Context> primary;
};

// ---- All of it ----

struct State {
  std::mutex mutex;  // of everything here but the streams' queues
  pid_t pid = 0;     // that called cuInit()
  // So many calls of cuInit(), and for contexts, were refused or asked for.
  int64_t not_ready = 0;
  int64_t contexts_not_ready = 0;
  Settings settings;
  std::vector<std::unique_ptr<Device>> devices;
  std::map<uintptr_t, Reservation> reservations;
  std::map<uintptr_t, HostRange> host;
  std::map<CUmemGenericAllocationHandle, std::shared_ptr<Allocation>> handles;
  CUmemGenericAllocationHandle next_handle = 1;
  std::map<std::pair<pid_t, ino_t>, OpenedHandle> opened;
  std::map<CUstream, std::shared_ptr<Stream>> streams;
  std::map<CUevent, std::unique_ptr<Event>> events;
  struct Pending {
    Range range;
    std::string name;
  };
  std::list<Pending> pending;
  // Descriptors of memory that this process has made: nobody holds what can be locked alone.
  struct Made {
    int fd = -1;
    size_t bytes = 0;
    int device = 0;
  };
  std::list<Made> made;
  std::atomic<int64_t> kernels{0};
};
[[nodiscard]] State& All();

// Return CUDA_SUCCESS, or the error of a call that needs the driver, or a context.
[[nodiscard]] CUresult NeedDriver();
[[nodiscard]] CUresult NeedContext(Context** context);
[[nodiscard]] CUresult NeedDevice(CUdevice device);
// Finds the stream of a call; nullptr means the default stream of the current context. Ends the
// process where the stream is of another context.
[[nodiscard]] CUresult NeedStream(CUstream stream, std::shared_ptr<Stream>* found);

// The calls below REQUIRE All().mutex.

// Returns the mapping that holds an address, and where it begins; nullptr where there is none.
[[nodiscard]] Mapped* FindMapped(uintptr_t address, uintptr_t* begin = nullptr);
[[nodiscard]] Reservation* FindReservation(uintptr_t address, uintptr_t* begin = nullptr);
[[nodiscard]] bool IsPinned(uintptr_t address, size_t bytes);
enum class Use : uint8_t { kCopy, kKernel };
// Returns whether work of a device may touch the range. Copies may touch any memory of the host,
// kernels what is pinned.
[[nodiscard]] bool Accessible(uintptr_t address, size_t bytes, const Context& context, Use use);
// Returns the device whose memory it is; -1 for the host's.
[[nodiscard]] int OwnerOf(uintptr_t address);
// Ends the process if queued work uses the range.
void MustBeIdle(uintptr_t address, size_t bytes, const char* call);
[[nodiscard]] size_t UsedBytes(int device);
// Makes memory of a device. CUDA_ERROR_OUT_OF_MEMORY where it has not as much left.
[[nodiscard]] CUresult MakeAllocation(size_t bytes, int device, std::shared_ptr<Allocation>* made);
[[nodiscard]] CUresult Reserve(size_t bytes, size_t alignment, uintptr_t* address);
[[nodiscard]] CUresult MapAt(uintptr_t address, size_t bytes,
                             std::shared_ptr<Allocation> allocation);
void UnmapAt(uintptr_t address);
void FreeReservation(uintptr_t address);

// Returns where workers find what lies at a device address. Takes the lock.
[[nodiscard]] std::byte* Alias(uintptr_t address);

void Log(int device, const std::string& line);
// The program allocates, gives back, or waits for the device.
void LogCall(const char* name);
[[nodiscard]] int64_t NowNs();

}  // namespace dmuond::fake_cuda

#endif  // DMUOND_TESTS_FAKE_CUDA_DRIVER_STATE_H_
