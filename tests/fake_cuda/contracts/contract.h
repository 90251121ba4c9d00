// Statements about the CUDA driver that the product takes for granted, each checked by a process of
// its own. A statement is written as
//
//   CONTRACT(memory_is_zero, "memory that another process has freed reads as zero") {
//     Child other([](Channel& parent) { … });
//     …
//     return zero ? Holds("64 MiB") : Fails("byte %zu is %d", i, value);
//   }
//
// and may throw Broken, as Must() does. A process that crashes or does not end is a statement that
// does not hold.
#ifndef DMUOND_TESTS_FAKE_CUDA_CONTRACTS_CONTRACT_H_
#define DMUOND_TESTS_FAKE_CUDA_CONTRACTS_CONTRACT_H_

#include <cuda.h>
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

namespace dmuond::contracts {

// ---- Statements ----

enum class Verdict : uint8_t { kHolds, kFails, kSkipped };
struct Seen {
  Verdict verdict;
  std::string what;
};
[[nodiscard]] std::string Text(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[nodiscard]] Seen Holds(const std::string& what = "");
[[nodiscard]] Seen Fails(const std::string& what);
[[nodiscard]] Seen Skipped(const std::string& why);

struct Contract {
  const char* name;
  const char* statement;
  Seen (*check)();
};
[[nodiscard]] std::vector<Contract>& Contracts();
struct Registered {
  Registered(const char* name, const char* statement, Seen (*check)()) {
    Contracts().push_back({name, statement, check});
  }
};
#define CONTRACT(name, statement)                                    \
  static Seen name();                                                \
  static const Registered registered_##name(#name, statement, name); \
  static Seen name()

// Is thrown where a statement cannot be checked further: it does not hold.
struct Broken {
  std::string what;
};

// ---- The driver ----

// Returns the address of a function in libcuda.so.1. Throws Broken where there is none.
[[nodiscard]] void* Symbol(const char* name);
[[nodiscard]] bool IsFake();
#define DMUOND_TEXT_OF(name) #name
#define DMUOND_CALL(name) (*reinterpret_cast<decltype(&::name)>(Symbol(DMUOND_TEXT_OF(name))))
// Is a function of the driver, in the version that <cuda.h> declares: CU(cuMemAlloc)(&address, n).
#define CU(name) DMUOND_CALL(name)

[[nodiscard]] std::string Name(CUresult result);
void Must(CUresult result, const char* call);
// Calls a function of the driver, and throws Broken where it does not succeed.
#define MUST(name, ...) Must(CU(name)(__VA_ARGS__), #name)

// ---- What most statements need. Nothing is given back before the process ends. ----

inline constexpr size_t kMiB = size_t{1} << 20;

[[nodiscard]] int Attribute(CUdevice_attribute attribute, CUdevice device = 0);
// Initialises the driver. An MPS server that recovers from a client's fault is asked again, for 15
// s at most, and what is returned says how often and for how long.
struct NotReady {
  std::map<CUresult, int> errors;
  double milliseconds = 0;
};
NotReady Initialise();
int Devices();                         // initialises the driver
CUcontext UseContext(int device = 0);  // initialises the driver; the device's primary context
[[nodiscard]] CUmemAllocationProp Properties(int device = 0);
[[nodiscard]] size_t Granularity(int device = 0);
// Memory that can be exported. `bytes` are a multiple of the granularity.
[[nodiscard]] CUmemGenericAllocationHandle Make(size_t bytes, int device = 0);
[[nodiscard]] int Export(CUmemGenericAllocationHandle handle);
[[nodiscard]] CUmemGenericAllocationHandle Import(int fd);
// `access`: the device that may use it; -1 for none.
[[nodiscard]] CUdeviceptr Map(CUmemGenericAllocationHandle handle, size_t bytes, int access = 0);
void Unmap(CUdeviceptr address, size_t bytes);
[[nodiscard]] CUstream MakeStream();  // non-blocking
[[nodiscard]] CUevent MakeEvent(unsigned flags = CU_EVENT_DISABLE_TIMING);
// Makes pinned memory, filled with zeros. It has the same address for host and device.
[[nodiscard]] uint64_t* Pinned(size_t bytes);
[[nodiscard]] inline CUdeviceptr At(const void* host) {
  return reinterpret_cast<CUdeviceptr>(host);
}
// Makes every 32-bit word `value`, and waits until that is done.
void Set(CUdeviceptr address, size_t bytes, uint32_t value);
// Returns whether all 32-bit words are `value`, and says in `other` which is not.
[[nodiscard]] bool All(CUdeviceptr address, size_t bytes, uint32_t value, std::string* other);

// Returns whether `done` becomes true in that time.
bool Within(int milliseconds, const std::function<bool()>& done);
[[nodiscard]] double NowMs();

// A stream stops at Close() until somebody opens the gate.
class Gate {
 public:
  Gate();
  ~Gate();
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  void Close(CUstream stream);
  void Open();
  void OpenAfter(int milliseconds);  // from another thread
  [[nodiscard]] bool open() const { return opened_; }

 private:
  uint64_t* word_;
  std::atomic<bool> opened_ = false;
  std::thread later_;
};

// ---- Processes ----

class Channel {
 public:
  explicit Channel(int socket) : socket_(socket) {}
  void Send(const std::string& bytes, int fd = -1);
  // Broken where the other end has failed or ended.
  std::string Receive(int* fd = nullptr);
  [[nodiscard]] int socket() const { return socket_; }

 private:
  int socket_;
};

// Is a fork that runs `run`. It must be made before this process initialises the driver, which a
// fork cannot use afterwards. It ends when `run` returns, and at the latest with this process.
class Child {
 public:
  explicit Child(const std::function<void(Channel&)>& run);
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  void Kill();  // SIGKILL, and waits for the end
  int Wait();   // for the end; its status as of waitpid()
  Channel& channel() { return channel_; }

 private:
  pid_t pid_ = -1;
  Channel channel_{-1};
};

// ---- Kernels ----

// Runs a kernel that has every multiprocessor until it is told to end. Work that is done meanwhile
// took none of them.
class Spin {
 public:
  Spin();
  ~Spin() { End(); }
  Spin(const Spin&) = delete;
  Spin& operator=(const Spin&) = delete;
  void End();

 private:
  uint64_t* stop_;
  CUstream stream_;
};
// Enqueues a kernel that stores `value` to `address`.
void Store(CUstream stream, CUdeviceptr address, uint64_t value);

}  // namespace dmuond::contracts

#endif  // DMUOND_TESTS_FAKE_CUDA_CONTRACTS_CONTRACT_H_
