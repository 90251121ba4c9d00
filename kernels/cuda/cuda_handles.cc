#include "kernels/cuda/cuda_handles.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace dmuond::kernels::cuda {

// Closed with the last mapping of it.
class CudaHandles::Allocation {
 public:
  Allocation(const Driver& driver, CUdeviceptr base, size_t bytes, const HandleMemory& memory)
      : driver_(driver),
        base_(base),
        bytes_(bytes),
        buffer_(memory.buffer),
        generation_(memory.generation) {}
  ~Allocation() { driver_.ipc_close(base_); }
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
  [[nodiscard]] CUdeviceptr base() const { return base_; }
  [[nodiscard]] size_t bytes() const { return bytes_; }
  [[nodiscard]] uint64_t buffer() const { return buffer_; }
  [[nodiscard]] uint64_t generation() const { return generation_; }

 private:
  const Driver& driver_;
  const CUdeviceptr base_;
  const size_t bytes_;
  const uint64_t buffer_;
  const uint64_t generation_;
};

namespace {

template <typename Allocation>
class Slice final : public Mapping {
 public:
  Slice(std::shared_ptr<Allocation> allocation, size_t offset, size_t bytes)
      : allocation_(std::move(allocation)), offset_(offset), bytes_(bytes) {}
  [[nodiscard]] std::byte* data() const override {
    return reinterpret_cast<std::byte*>(allocation_->base() + offset_);
  }
  [[nodiscard]] size_t size() const override { return bytes_; }

 private:
  std::shared_ptr<Allocation> allocation_;
  size_t offset_;
  size_t bytes_;
};

}  // namespace

std::string UuidOf(const Driver& driver, CUdevice device) {
  CUuuid uuid{};
  driver.device_get_uuid(&uuid, device);
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    absl::StrAppendFormat(&text, "%02x", static_cast<unsigned char>(uuid.bytes[i]));
  }
  return text;
}

absl::Status CheckAccess(const Driver& driver, CUdevice device, CUdevice owner) {
  if (device == owner) return absl::OkStatus();
  int can = 0;
  absl::Status status =
      driver.Check(driver.device_can_access_peer(&can, device, owner), "cuDeviceCanAccessPeer");
  if (!status.ok() || can != 0) return status;
  return absl::FailedPreconditionError(
      absl::StrCat(NameOf(driver, device), " cannot access the memory of ", NameOf(driver, owner),
                   ": there is no peer access between them"));
}

absl::Status CudaHandles::CheckDevice(const std::string& uuid) const {
  int count = 0;
  absl::Status status = driver_.Check(driver_.device_get_count(&count), "cuDeviceGetCount");
  for (CUdevice device = 0; status.ok() && device < count; ++device) {
    if (UuidOf(driver_, device) == uuid) return CheckAccess(driver_, device_, device);
  }
  if (!status.ok()) return status;
  return absl::NotFoundError(absl::StrCat("the handle is of device ", uuid,
                                          ", which is none of the ", count,
                                          " that this process sees"));
}

absl::StatusOr<std::shared_ptr<CudaHandles::Allocation>> CudaHandles::Open(
    const HandleMemory& memory) {
  std::weak_ptr<Allocation>& place = open_[memory.handle];
  if (std::shared_ptr<Allocation> open = place.lock()) {
    if (open->buffer() == memory.buffer && open->generation() == memory.generation) return open;
    return absl::FailedPreconditionError(
        absl::StrCat("the handle is still open as generation ", open->generation(), " of buffer ",
                     open->buffer(), "; it cannot be generation ", memory.generation, " of buffer ",
                     memory.buffer, " at the same time"));
  }
  CUipcMemHandle handle{};
  std::memcpy(&handle, memory.handle.data(), sizeof(handle));
  CUdeviceptr base = 0;
  CUresult result = driver_.ipc_open(&base, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
  if (result != CUDA_SUCCESS) {
    return absl::InvalidArgumentError(
        absl::StrCat("the handle cannot be opened; its process may have ended: ",
                     driver_.Check(result, "cuIpcOpenMemHandle").message()));
  }
  size_t bytes = 0;
  result = driver_.mem_get_address_range(nullptr, &bytes, base);
  auto allocation = std::make_shared<Allocation>(driver_, base, bytes, memory);
  RETURN_IF_ERROR(driver_.Check(result, "cuMemGetAddressRange"));
  place = allocation;
  return allocation;
}

absl::StatusOr<std::unique_ptr<Mapping>> CudaHandles::Map(const HandleMemory& memory) {
  if (memory.handle.size() != sizeof(CUipcMemHandle)) {
    return absl::InvalidArgumentError(absl::StrCat("a handle has ", sizeof(CUipcMemHandle),
                                                   " bytes, this one ", memory.handle.size()));
  }
  if (memory.bytes == 0 || memory.offset % kHandleOffsetAlignment != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        memory.bytes, " bytes at offset ", memory.offset,
        " of a handle's memory: must be some, at a multiple of ", kHandleOffsetAlignment));
  }
  RETURN_IF_ERROR(CheckDevice(memory.device_uuid));
  ASSIGN_OR_RETURN(std::shared_ptr<Allocation> allocation, Open(memory));
  const size_t whole = allocation->bytes();
  if (memory.offset > whole || memory.bytes > whole - memory.offset) {
    return absl::OutOfRangeError(absl::StrCat(memory.bytes, " bytes at offset ", memory.offset,
                                              " of a handle's memory, which has ", whole));
  }
  return std::make_unique<Slice<Allocation>>(std::move(allocation), memory.offset, memory.bytes);
}

}  // namespace dmuond::kernels::cuda
