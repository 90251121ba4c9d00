// An Arenas maps a session's arenas. Without one in Options::arenas a session maps them in host
// memory. DeviceArenas (device_arenas.h) maps them on a GPU; a trainer opens it and passes it on.
#ifndef DMUOND_CLIENT_ARENAS_H_
#define DMUOND_CLIENT_ARENAS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

struct CUstream_st;  // CUDA's; a cudaStream_t points to it

namespace dmuond::client {

// Threads: as Session, but for what says so.
class Arenas {
 public:
  virtual ~Arenas() = default;

  // An arena, unmapped when destroyed: nothing that is enqueued may use it then.
  class Memory {
   public:
    virtual ~Memory() = default;
    [[nodiscard]] virtual std::byte* data() const = 0;  // an address of the device
    [[nodiscard]] virtual size_t bytes() const = 0;
    // All of it, to host memory and back. Done when it returns. Read() waits for the device first:
    // gradients may still be on their way.
    virtual absl::Status Read(std::byte* to) const = 0;
    virtual absl::Status Write(const std::byte* from) = 0;
    // Lies at the addresses of `place` from now on, which gives them up. REQUIRES: `place` is of
    // the same Arenas and has as many bytes.
    virtual absl::Status MoveTo(Memory& place) = 0;
  };

  // Words of host memory, as streams of the device store into them and wait for them.
  class Words {
   public:
    // Waits for what is enqueued.
    virtual ~Words() = default;
    // Stores the value into the words, in their order, when everything is done that has been
    // enqueued in the stream; without one, at once. Behind earlier stores in either case, so that
    // no older value follows a newer one. Does not hold the stream up. FAILED_PRECONDITION: the
    // stream is being captured. Threads: any.
    virtual absl::Status StoreAfter(std::optional<CUstream_st*> stream,
                                    std::span<uint64_t* const> words, uint64_t value) = 0;
    // Has the stream wait until every word is at least the value. FAILED_PRECONDITION: the stream
    // is being captured.
    virtual absl::Status WaitFor(CUstream_st* stream, std::span<uint64_t* const> words,
                                 uint64_t value) = 0;
    // An error: the device's context has failed (an illegal access, say), and no store or wait
    // that is enqueued happens any more. Does not wait.
    virtual absl::Status Check() = 0;
    // Returns when all of these stores and waits have happened.
    virtual absl::Status Finish() = 0;
  };

  // Returns the device's uuid, "GPU-…"; empty: the arenas lie in host memory.
  [[nodiscard]] virtual std::string device_uuid() const = 0;
  // Maps memory that the daemon has made on this device. Keeps no hold of the descriptor.
  virtual absl::StatusOr<std::unique_ptr<Memory>> Map(int fd, size_t bytes) = 0;
  // An arena in the trainer's own memory, and what lanes open it by: fields of Arena.CudaIpc in
  // trainer.proto.
  struct Own {
    std::unique_ptr<Memory> memory;
    std::string handle;  // 64 bytes
    uint64_t base_offset = 0;
    uint64_t allocation_bytes = 0;
    uint64_t buffer_id = 0;
  };
  // Exports memory of this device, which stays the caller's. INVALID_ARGUMENT: it is not all of one
  // allocation of this device, or begins at no multiple of 16 bytes; FAILED_PRECONDITION: memory of
  // its kind has no handle, and what to set instead.
  virtual absl::StatusOr<Own> Export(std::byte* memory, size_t bytes) = 0;
  // Makes the words of a mapped page, which must outlive them. Null: the device has no streams.
  virtual absl::StatusOr<std::unique_ptr<Words>> MakeWords(void* page, size_t bytes) = 0;
};

}  // namespace dmuond::client

#endif  // DMUOND_CLIENT_ARENAS_H_
