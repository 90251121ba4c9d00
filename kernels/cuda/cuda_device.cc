#include "kernels/cuda/cuda_device.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/mps.h"
#include "base/status_macros.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/cuda_stream.h"
#include "kernels/cuda/library_product.h"

namespace dmuond::kernels::cuda {
namespace {

// Memory of this process alone.
class OwnMemory final : public Mapping {
 public:
  // `free`: of its address.
  template <typename Free>
  OwnMemory(void* data, size_t size, Free free)
      : data_(static_cast<std::byte*>(data)), size_(size), free_(std::move(free)) {}
  ~OwnMemory() override { free_(data_); }
  OwnMemory(const OwnMemory&) = delete;
  OwnMemory& operator=(const OwnMemory&) = delete;
  [[nodiscard]] std::byte* data() const override { return data_; }
  [[nodiscard]] size_t size() const override { return size_; }

 private:
  std::byte* data_;
  size_t size_;
  std::function<void(std::byte*)> free_;
};

int AttributeOf(const Driver& driver, CUdevice device, CUdevice_attribute attribute) {
  int value = 0;
  driver.device_get_attribute(&value, attribute, device);
  return value;
}

std::string ModelOf(const Driver& driver, CUdevice device) {
  char name[256] = "";
  driver.device_get_name(name, sizeof(name), device);
  return name;
}

int Multiprocessors(const Driver& driver, CUdevice device) {
  return AttributeOf(driver, device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
}

std::string DescribeDevice(const Driver& driver, CUdevice device, ProductEngine engine) {
  int version = 0;
  driver.driver_get_version(&version);
  return absl::StrFormat(
      "cuda %s uuid=%s driver=%d.%d runtime=%d.%d sms=%d mps=%d engine=%s", ModelOf(driver, device),
      UuidOf(driver, device), version / 1000, version % 1000 / 10, CUDART_VERSION / 1000,
      CUDART_VERSION % 1000 / 10, Multiprocessors(driver, device),
      AttributeOf(driver, device, CU_DEVICE_ATTRIBUTE_MPS_ENABLED),
      engine == ProductEngine::kOwn ? "own" : absl::StrCat("cublaslt-", LibraryVersion()));
}

// The engine that `asked` means on this device.
absl::StatusOr<ProductEngine> EngineOf(const Driver& driver, CUdevice device, ProductEngine asked) {
  const int major = AttributeOf(driver, device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  const int minor = AttributeOf(driver, device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  if (major < 8) {
    return absl::UnimplementedError(absl::StrCat(NameOf(driver, device), " has compute capability ",
                                                 major, ".", minor,
                                                 "; the kernels are built for 8.0 and later"));
  }
  const bool hopper = major == 9 && minor == 0;
  if (asked == ProductEngine::kOwn && !hopper) {
    return absl::UnimplementedError(
        absl::StrCat(NameOf(driver, device), " has compute capability ", major, ".", minor,
                     "; the own matrix products are built for 9.0 (H100, H200): choose cuBLASLt"));
  }
  if (asked == ProductEngine::kOwn || (asked == ProductEngine::kDefault && hopper)) {
    return ProductEngine::kOwn;
  }
  RETURN_IF_ERROR(CheckLibrary());
  return ProductEngine::kLibrary;
}

// "580.159.04", as the kernel module says; else the CUDA version that the driver speaks.
std::string DriverVersion(const Driver& driver) {
  std::ifstream file("/proc/driver/nvidia/version");
  std::string line;
  std::getline(file, line);
  for (const absl::string_view word : absl::StrSplit(line, ' ', absl::SkipEmpty())) {
    if (absl::StrContains(word, '.') && absl::ascii_isdigit(word.front())) return std::string(word);
  }
  int version = 0;
  driver.driver_get_version(&version);
  return absl::StrFormat("cuda-%d.%d", version / 1000, version % 1000 / 10);
}

}  // namespace

CudaDevice::CudaDevice(const Driver& driver, CUdevice device, size_t granularity,
                       std::string description, ProductEngine engine)
    : driver_(driver),
      device_(device),
      granularity_(granularity),
      description_(std::move(description)),
      handles_(driver, device),
      ops_(driver, engine) {}

absl::StatusOr<std::unique_ptr<CudaDevice>> CudaDevice::Create(int ordinal, ProductEngine asked) {
  ASSIGN_OR_RETURN(const Driver* const driver, Driver::Get());
  const Driver& d = *driver;
  ASSIGN_OR_RETURN(const CUdevice device, FindDevice(d, ordinal));
  // Never released: streams, events and what the runtime has loaded live in it.
  CUcontext context = nullptr;
  const CUresult retained = OnceMpsHasRecovered(
      kMpsPatienceForContext, [&] { return d.primary_context_retain(&context, device); });
  absl::Status status = d.Check(retained, "cuDevicePrimaryCtxRetain");
  if (status.ok()) status = d.Check(d.context_set_current(context), "cuCtxSetCurrent");
  if (!status.ok()) return status;
  // Loads the library's handle into this context.
  ASSIGN_OR_RETURN(const ProductEngine engine, EngineOf(d, device, asked));
  ASSIGN_OR_RETURN(const size_t granularity, Granularity(d, device));
  return std::unique_ptr<CudaDevice>(
      new CudaDevice(d, device, granularity, DescribeDevice(d, device, engine), engine));
}

std::string CudaDevice::DescribeType() const {
  const std::string library = LibraryVersion();
  return absl::StrFormat("cuda %s sms=%d driver=%s cublaslt=%s kernels=%s",
                         ModelOf(driver_, device_), Multiprocessors(driver_, device_),
                         DriverVersion(driver_), library.empty() ? "none" : library,
                         DMUOND_KERNELS_HASH);
}

bool CudaDevice::takes_turns() const {
  return AttributeOf(driver_, device_, CU_DEVICE_ATTRIBUTE_MPS_ENABLED) == 0;
}

absl::StatusOr<std::unique_ptr<Mapping>> CudaDevice::Map(int fd, size_t bytes) {
  return MapForDevice(driver_, device_, granularity_, fd, bytes);
}

absl::StatusOr<std::unique_ptr<Mapping>> CudaDevice::AllocateScratch(size_t bytes) {
  if (bytes == 0) return absl::InvalidArgumentError("cannot allocate 0 bytes");
  CUdeviceptr address = 0;
  RETURN_IF_ERROR(driver_.Check(driver_.mem_alloc(&address, bytes),
                                absl::StrCat("cuMemAlloc of ", bytes, " bytes")));
  return std::make_unique<OwnMemory>(
      reinterpret_cast<void*>(address), bytes,
      [free = driver_.mem_free](std::byte* data) { free(reinterpret_cast<CUdeviceptr>(data)); });
}

absl::StatusOr<std::unique_ptr<Mapping>> CudaDevice::AllocateHost(size_t bytes) {
  if (bytes == 0) return absl::InvalidArgumentError("cannot allocate 0 bytes");
  void* data = nullptr;
  RETURN_IF_ERROR(driver_.Check(driver_.mem_host_alloc(&data, bytes, CU_MEMHOSTALLOC_DEVICEMAP),
                                absl::StrCat("cuMemHostAlloc of ", bytes, " bytes")));
  std::memset(data, 0, bytes);
  return std::make_unique<OwnMemory>(
      data, bytes, [free = driver_.mem_free_host](std::byte* memory) { free(memory); });
}

absl::StatusOr<std::unique_ptr<Stream>> CudaDevice::CreateStream() {
  return CudaStream::Create(driver_);
}

absl::StatusOr<std::unique_ptr<Event>> CudaDevice::CreateEvent() {
  return CudaEvent::Create(driver_);
}

}  // namespace dmuond::kernels::cuda
