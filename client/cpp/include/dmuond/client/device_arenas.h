// Arenas on a GPU: gradients and weights lie where the trainer computes, in memory that the daemon
// holds, so that they outlive the trainer; or in the trainer's own (ArenaSpec::memory), which lanes
// open by the driver's 64-byte handles.
//
//   auto arenas = DeviceArenas::Open(/*ordinal=*/0);
//   auto session = Session::Open({.rank = rank, .world_size = world_size, .arenas = *arenas});
//   … Register, Attach; Weight<float>(w) and Gradient<float>(w) are addresses of the device …
//   for (…) {
//     … enqueue forward and backward pass in `stream`; as a bucket's gradients are enqueued: …
//     session->MarkReady(bucket, stream);
//     auto outcome = session->Submit(scalars, {.stream = stream});  // waits for the decision
//     session->WaitPublished(stream);  // what is enqueued from here on finds the new weights
//   }
//
// The first weights must be there, not enqueued, when Push() is called. Session::Step() waits for
// the weights on the host and is right, too.
//
// Links nothing of CUDA: the driver (libcuda.so.1) is loaded by Open(). A cudaStream_t is what is
// called CUstream_st* here. Streams are those of the device's primary context, which the runtime
// uses.
#ifndef DMUOND_CLIENT_DEVICE_ARENAS_H_
#define DMUOND_CLIENT_DEVICE_ARENAS_H_

#include <memory>
#include <string>

#include "dmuond/client/arenas.h"

namespace dmuond::client {

// Must outlive nothing: sessions, and what they have mapped, share it. Threads: any.
class DeviceArenas final : public Arenas {
 public:
  // `ordinal`: as CUDA counts the devices of this process. UNAVAILABLE: there is no driver, or it
  // is too old; NOT_FOUND: no such device.
  [[nodiscard]] static absl::StatusOr<std::shared_ptr<Arenas>> Open(int ordinal);

  [[nodiscard]] std::string device_uuid() const override;
  absl::StatusOr<std::unique_ptr<Memory>> Map(int fd, size_t bytes) override;
  absl::StatusOr<Own> Export(std::byte* memory, size_t bytes) override;
  absl::StatusOr<std::unique_ptr<Words>> MakeWords(void* page, size_t bytes) override;

 private:
  class Device;
  class DeviceMemory;
  class OwnMemory;
  class DeviceWords;
  explicit DeviceArenas(std::shared_ptr<const Device> device) : device_(std::move(device)) {}
  const std::shared_ptr<const Device> device_;
};

}  // namespace dmuond::client

#endif  // DMUOND_CLIENT_DEVICE_ARENAS_H_
