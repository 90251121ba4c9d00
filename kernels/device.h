// The device seam: memory held by file descriptor, streams, events. Two implementations: cpu/
// (memfd, synchronous streams) and cuda/ (cuMemCreate, CUDA streams).
//
// Two faces, because the daemon must never create a device context:
//   MemoryHolder  used by dmuond: makes memory and holds it by descriptor. Creates no context.
//   Device        used by dmuond-lane: maps such memory, copies, computes.
#ifndef DMUOND_KERNELS_DEVICE_H_
#define DMUOND_KERNELS_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace dmuond::kernels {

using wire::UniqueFd;

// Element types of gradients, weights and intermediate matrices.
enum class DType : uint8_t { kF32 = 1, kBF16 = 2, kF16 = 3 };
[[nodiscard]] size_t SizeOf(DType dtype);
[[nodiscard]] const char* Name(DType dtype);  // "float32", "bfloat16", "float16"

// Makes device memory and keeps it by descriptor. Threads: any. Never blocks on a device.
class MemoryHolder {
 public:
  virtual ~MemoryHolder() = default;
  // Zero-filled memory of `bytes` (> 0; rounded up to the device's granularity), sealed against
  // growing and shrinking where the device's descriptors can be. The memory lives as long as any
  // descriptor or mapping of it. RESOURCE_EXHAUSTED when there is none left.
  virtual absl::StatusOr<UniqueFd> Allocate(size_t bytes, const std::string& name) = 0;
  // What memory of `bytes` takes of the device.
  [[nodiscard]] virtual size_t Rounded(size_t bytes) const { return bytes; }
  // OK if `fd` really is memory of this device of at least `bytes`, and cannot shrink under a
  // mapping.
  virtual absl::Status Check(int fd, size_t bytes) = 0;
};

// A mapping of held memory into a lane; unmapped when destroyed. Movable by unique_ptr only.
class Mapping {
 public:
  virtual ~Mapping() = default;
  [[nodiscard]] virtual std::byte* data() const = 0;  // a device address
  [[nodiscard]] virtual size_t size() const = 0;
};

// A point in a stream that the host can poll: made once, recorded again and again. Threads: the
// lane's dispatching thread.
class Event {
 public:
  virtual ~Event() = default;
  // True: everything enqueued before the last record is complete; also before the first record. An
  // error of the device ends the lane.
  [[nodiscard]] virtual absl::StatusOr<bool> Done() = 0;
};

// An ordered queue of device work. On the CPU work is done when the call returns.
// Threads: one thread per stream.
class Stream {
 public:
  // Waits until the stream is empty.
  virtual ~Stream() = default;
  // `event`, of the same device, now stands for this point of the stream. Never blocks.
  virtual absl::Status Record(Event& event) = 0;
  // Later work in this stream starts after `event`.
  virtual absl::Status WaitFor(Event& event) = 0;
  // Blocks the host until the stream is empty. Not used in the steady state of a step.
  virtual absl::Status Synchronize() = 0;
};

// Memory of another process that it did not get from a MemoryHolder: a part of an allocation, whose
// handle the device's driver gave to that process.
inline constexpr uint64_t kHandleOffsetAlignment = 16;
struct HandleMemory {
  std::string handle;       // 64 bytes
  std::string device_uuid;  // "GPU-…": whose memory it is
  uint64_t offset = 0;      // of the part, a multiple of kHandleOffsetAlignment
  size_t bytes = 0;         // of the part
  // Tell allocations apart that have the same handle one after the other.
  uint64_t buffer = 0;
  uint64_t generation = 0;
};

class Ops;

// One local device, as a lane sees it. Threads: the lane's dispatching thread.
class Device {
 public:
  virtual ~Device() = default;
  [[nodiscard]] virtual std::string Describe()
      const = 0;  // type, uuid, driver: for logs and cost tables
  // Whether kernels of this process and of others never run on the device side by side: one that is
  // launched beside another process's work makes both wait for their turns. A GPU without MPS.
  [[nodiscard]] virtual bool takes_turns() const { return false; }
  // Whether links to other devices sleep while they carry nothing, and take power from the device's
  // computing while they are awake, so that what can wait had better cross all at once. A GPU.
  [[nodiscard]] virtual bool links_sleep() const { return false; }
  // Maps memory that a MemoryHolder made (or a trainer's own, already checked). The descriptor may
  // be closed afterwards. `bytes` as they were allocated; the CPU's memory may be mapped in part.
  virtual absl::StatusOr<std::unique_ptr<Mapping>> Map(int fd, size_t bytes) = 0;
  // Maps the memory of such a handle. The allocation is closed with its last mapping; parts of it
  // that are mapped at once are of one generation. INVALID_ARGUMENT: a handle of another length, or
  // that cannot be opened; NOT_FOUND: no such device here; FAILED_PRECONDITION: its memory cannot
  // be accessed from here, or an older generation is mapped; OUT_OF_RANGE: beyond the allocation;
  // UNIMPLEMENTED: this device has no handles.
  virtual absl::StatusOr<std::unique_ptr<Mapping>> MapHandle(const HandleMemory& memory);
  // Private scratch of this process, for workspaces. Contents undefined.
  virtual absl::StatusOr<std::unique_ptr<Mapping>> AllocateScratch(size_t bytes) = 0;
  // Private memory that both the device's work and the host read and write (pinned). Zero-filled.
  virtual absl::StatusOr<std::unique_ptr<Mapping>> AllocateHost(size_t bytes) = 0;
  virtual absl::StatusOr<std::unique_ptr<Stream>> CreateStream() = 0;
  virtual absl::StatusOr<std::unique_ptr<Event>> CreateEvent() = 0;
  // What can be computed here; lives as long as the device.
  [[nodiscard]] virtual Ops& ops() = 0;
};

}  // namespace dmuond::kernels

#endif  // DMUOND_KERNELS_DEVICE_H_
