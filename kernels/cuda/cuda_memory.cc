#include "kernels/cuda/cuda_memory.h"

#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/cuda/cuda_handles.h"
#include "kernels/cuda/free_memory.h"

namespace dmuond::kernels::cuda {
namespace {

// 0 where the result would not fit.
size_t RoundUp(size_t bytes, size_t granularity) {
  return bytes > std::numeric_limits<size_t>::max() - granularity
             ? 0
             : (bytes + granularity - 1) / granularity * granularity;
}

// A handle of memory; mappings and descriptors keep the memory without it.
class Handle {
 public:
  Handle(const Driver& driver, CUmemGenericAllocationHandle handle)
      : driver_(driver), handle_(handle) {}
  ~Handle() { driver_.mem_release(handle_); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  [[nodiscard]] CUmemGenericAllocationHandle get() const { return handle_; }

 private:
  const Driver& driver_;
  CUmemGenericAllocationHandle handle_;
};

absl::StatusOr<std::unique_ptr<Handle>> Import(const Driver& driver, int fd) {
  CUmemGenericAllocationHandle handle = 0;
  const CUresult result =
      driver.mem_import(&handle, reinterpret_cast<void*>(static_cast<uintptr_t>(fd)),
                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  if (result != CUDA_SUCCESS) {
    return absl::InvalidArgumentError(
        absl::StrCat("descriptor is not device memory: ",
                     driver.Check(result, "cuMemImportFromShareableHandle").message()));
  }
  return std::make_unique<Handle>(driver, handle);
}

// Whose memory it is.
absl::StatusOr<CUdevice> DeviceOf(const Driver& driver, const Handle& handle) {
  CUmemAllocationProp properties{};
  RETURN_IF_ERROR(driver.Check(driver.mem_get_allocation_properties(&properties, handle.get()),
                               "cuMemGetAllocationPropertiesFromHandle"));
  return properties.location.id;
}

// A range of addresses with memory behind it, which no device may access yet.
class Range final : public Mapping {
 public:
  static absl::StatusOr<std::unique_ptr<Range>> Make(const Driver& driver, const Handle& handle,
                                                     size_t granularity, size_t bytes) {
    if (bytes == 0) return absl::InvalidArgumentError("cannot map 0 bytes");
    const size_t rounded = RoundUp(bytes, granularity);
    if (rounded == 0) {
      return absl::OutOfRangeError(absl::StrCat("cannot map ", bytes, " bytes of device memory"));
    }
    std::unique_ptr<Range> range(new Range(driver, bytes, rounded));
    RETURN_IF_ERROR(driver.Check(
        driver.mem_address_reserve(&range->address_, range->reserved_, granularity, 0, 0),
        "cuMemAddressReserve"));
    const CUresult result = driver.mem_map(range->address_, range->reserved_, 0, handle.get(), 0);
    if (result != CUDA_SUCCESS) {
      return absl::OutOfRangeError(absl::StrCat("cannot map ", bytes,
                                                " bytes of device memory, which is mapped whole: ",
                                                driver.Check(result, "cuMemMap").message()));
    }
    range->mapped_ = true;
    return range;
  }
  ~Range() override {
    if (mapped_) driver_.mem_unmap(address_, reserved_);
    if (address_ != 0) driver_.mem_address_free(address_, reserved_);
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  absl::Status Allow(CUdevice device) {
    CUmemAccessDesc access{};
    access.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return driver_.Check(driver_.mem_set_access(address_, reserved_, &access, 1), "cuMemSetAccess");
  }

  [[nodiscard]] std::byte* data() const override {
    return reinterpret_cast<std::byte*>(static_cast<uintptr_t>(address_));
  }
  [[nodiscard]] size_t size() const override { return bytes_; }

 private:
  Range(const Driver& driver, size_t bytes, size_t reserved)
      : driver_(driver), bytes_(bytes), reserved_(reserved) {}

  const Driver& driver_;
  const size_t bytes_;
  const size_t reserved_;
  CUdeviceptr address_ = 0;
  bool mapped_ = false;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CudaMemoryHolder>> CudaMemoryHolder::Create(int ordinal) {
  ASSIGN_OR_RETURN(const Driver* const driver, Driver::Get());
  const Driver& d = *driver;
  ASSIGN_OR_RETURN(const CUdevice device, FindDevice(d, ordinal));
  ASSIGN_OR_RETURN(const size_t granularity, Granularity(d, device));
  return std::unique_ptr<CudaMemoryHolder>(new CudaMemoryHolder(d, device, granularity));
}

size_t CudaMemoryHolder::Rounded(size_t bytes) const { return RoundUp(bytes, granularity_); }

absl::StatusOr<UniqueFd> CudaMemoryHolder::Allocate(size_t bytes, const std::string& name) {
  if (bytes == 0) {
    return absl::InvalidArgumentError(absl::StrCat("memory '", name, "': 0 bytes wanted"));
  }
  const CUmemAllocationProp properties = SharedMemoryOf(device_);
  CUmemGenericAllocationHandle created = 0;
  const size_t rounded = Rounded(bytes);
  const CUresult result = rounded == 0 ? CUDA_ERROR_OUT_OF_MEMORY
                                       : driver_.mem_create(&created, rounded, &properties, 0);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    const std::optional<FreeMemory> left = FreeMemoryOf(UuidOf(driver_, device_));
    return absl::ResourceExhaustedError(absl::StrCat(
        "memory '", name, "': ", bytes, " bytes wanted, ", NameOf(driver_, device_), " has ",
        left.has_value() ? absl::StrCat(left->free_bytes, " of ", left->total_bytes, " bytes left")
                         : "not as many left"));
  }
  RETURN_IF_ERROR(driver_.Check(result, "cuMemCreate"));
  const Handle handle(driver_, created);
  int fd = -1;
  RETURN_IF_ERROR(driver_.Check(
      driver_.mem_export(&fd, handle.get(), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
      "cuMemExportToShareableHandle"));
  return UniqueFd(fd);
}

absl::Status CudaMemoryHolder::Check(int fd, size_t bytes) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Handle> handle, Import(driver_, fd));
  ASSIGN_OR_RETURN(const CUdevice device, DeviceOf(driver_, *handle));
  if (device != device_) {
    return absl::InvalidArgumentError(absl::StrCat("the memory is of ", NameOf(driver_, device),
                                                   ", not of ", NameOf(driver_, device_)));
  }
  return Range::Make(driver_, *handle, granularity_, bytes).status();
}

absl::StatusOr<std::unique_ptr<Mapping>> MapForDevice(const Driver& driver, CUdevice device,
                                                      size_t granularity, int fd, size_t bytes) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Handle> handle, Import(driver, fd));
  ASSIGN_OR_RETURN(const CUdevice owner, DeviceOf(driver, *handle));
  RETURN_IF_ERROR(CheckAccess(driver, device, owner));
  ASSIGN_OR_RETURN(std::unique_ptr<Range> range, Range::Make(driver, *handle, granularity, bytes));
  RETURN_IF_ERROR(range->Allow(device));
  return std::unique_ptr<Mapping>(std::move(range));
}

}  // namespace dmuond::kernels::cuda
