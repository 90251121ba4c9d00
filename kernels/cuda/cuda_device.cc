#include "kernels/cuda/cuda_device.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "kernels/cpu/cpu_memory.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/cuda_stream.h"
#include "kernels/cuda/library_product.h"

namespace dmuond::kernels::cuda {
namespace {

class RuntimeMemory final : public Mapping {
 public:
  using Free = cudaError_t (*)(void*);
  RuntimeMemory(void* data, size_t size, Free free)
      : data_(static_cast<std::byte*>(data)), size_(size), free_(free) {}
  ~RuntimeMemory() override { free_(data_); }
  RuntimeMemory(const RuntimeMemory&) = delete;
  RuntimeMemory& operator=(const RuntimeMemory&) = delete;
  [[nodiscard]] std::byte* data() const override { return data_; }
  [[nodiscard]] size_t size() const override { return size_; }

 private:
  std::byte* data_;
  size_t size_;
  Free free_;
};

std::string Uuid(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    absl::StrAppendFormat(&text, "%02x", static_cast<unsigned char>(uuid.bytes[i]));
  }
  return text;
}

std::string DescribeDevice(const Driver& driver, CUdevice device, const cudaDeviceProp& p,
                           ProductEngine engine) {
  int version = 0;
  driver.driver_get_version(&version);
  int mps = 0;
  driver.device_get_attribute(&mps, CU_DEVICE_ATTRIBUTE_MPS_ENABLED, device);
  return absl::StrFormat(
      "cuda %s uuid=%s driver=%d.%d runtime=%d.%d sms=%d mps=%d engine=%s", p.name, Uuid(p.uuid),
      version / 1000, version % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10,
      p.multiProcessorCount, mps,
      engine == ProductEngine::kOwn ? "own" : absl::StrCat("cublaslt-", LibraryVersion()));
}

// The engine that `asked` means on this device.
absl::StatusOr<ProductEngine> EngineOf(int ordinal, const cudaDeviceProp& p, ProductEngine asked) {
  if (p.major < 8) {
    return absl::UnimplementedError(absl::StrCat("cuda:", ordinal, " (", p.name,
                                                 ") has compute capability ", p.major, ".", p.minor,
                                                 "; the kernels are built for 8.0 and later"));
  }
  const bool hopper = p.major == 9 && p.minor == 0;
  if (asked == ProductEngine::kOwn && !hopper) {
    return absl::UnimplementedError(absl::StrCat(
        "cuda:", ordinal, " (", p.name, ") has compute capability ", p.major, ".", p.minor,
        "; the own matrix products are built for 9.0 (H100, H200): choose cuBLASLt"));
  }
  if (asked == ProductEngine::kOwn || (asked == ProductEngine::kDefault && hopper)) {
    return ProductEngine::kOwn;
  }
  if (absl::Status status = CheckLibrary(); !status.ok()) return status;
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
      ops_(driver, engine) {}

absl::StatusOr<std::unique_ptr<CudaDevice>> CudaDevice::Create(int ordinal, ProductEngine asked) {
  const absl::StatusOr<const Driver*> driver = Driver::Get();
  if (!driver.ok()) return driver.status();
  int count = 0;
  absl::Status status = CudaStatus(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  if (!status.ok()) return status;
  if (ordinal < 0 || ordinal >= count) {
    return absl::NotFoundError(
        absl::StrCat("there is no device cuda:", ordinal, "; this machine has ", count));
  }
  cudaDeviceProp properties{};
  status = CudaStatus(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties");
  if (!status.ok()) return status;
  // The first call that needs it makes the context.
  status = CudaStatus(cudaSetDevice(ordinal), "cudaSetDevice");
  if (status.ok()) status = CudaStatus(cudaFree(nullptr), "making a CUDA context");
  if (!status.ok()) return status;
  // Loads the library's handle into this context.
  const absl::StatusOr<ProductEngine> engine = EngineOf(ordinal, properties, asked);
  if (!engine.ok()) return engine.status();
  CUdevice device = 0;
  status = (*driver)->Check((*driver)->device_get(&device, ordinal), "cuDeviceGet");
  if (!status.ok()) return status;
  const absl::StatusOr<size_t> granularity = Granularity(**driver, device);
  if (!granularity.ok()) return granularity.status();
  return std::unique_ptr<CudaDevice>(
      new CudaDevice(**driver, device, *granularity,
                     DescribeDevice(**driver, device, properties, *engine), *engine));
}

std::string CudaDevice::DescribeType() const {
  cudaDeviceProp p{};
  int ordinal = 0;
  if (cudaGetDevice(&ordinal) != cudaSuccess ||
      cudaGetDeviceProperties(&p, ordinal) != cudaSuccess) {
    return "cuda";
  }
  const std::string library = LibraryVersion();
  return absl::StrFormat("cuda %s sms=%d driver=%s cublaslt=%s kernels=%s", p.name,
                         p.multiProcessorCount, DriverVersion(driver_),
                         library.empty() ? "none" : library, DMUOND_KERNELS_HASH);
}

absl::StatusOr<std::unique_ptr<Mapping>> CudaDevice::Map(int fd, size_t bytes) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return absl::ErrnoToStatus(errno, "fstat of device memory");
  if (S_ISREG(status.st_mode)) return cpu::MapShared(fd, bytes);
  return MapForDevice(driver_, device_, granularity_, fd, bytes);
}

absl::StatusOr<std::unique_ptr<Mapping>> CudaDevice::AllocateScratch(size_t bytes) {
  if (bytes == 0) return absl::InvalidArgumentError("cannot allocate 0 bytes");
  void* data = nullptr;
  const absl::Status status =
      CudaStatus(cudaMalloc(&data, bytes), absl::StrCat("cudaMalloc of ", bytes, " bytes"));
  if (!status.ok()) return status;
  return std::make_unique<RuntimeMemory>(data, bytes, cudaFree);
}

absl::StatusOr<std::unique_ptr<Mapping>> CudaDevice::AllocateHost(size_t bytes) {
  if (bytes == 0) return absl::InvalidArgumentError("cannot allocate 0 bytes");
  void* data = nullptr;
  const absl::Status status = CudaStatus(cudaHostAlloc(&data, bytes, cudaHostAllocMapped),
                                         absl::StrCat("cudaHostAlloc of ", bytes, " bytes"));
  if (!status.ok()) return status;
  std::memset(data, 0, bytes);
  return std::make_unique<RuntimeMemory>(data, bytes, cudaFreeHost);
}

absl::StatusOr<std::unique_ptr<Stream>> CudaDevice::CreateStream() { return CudaStream::Create(); }

absl::StatusOr<std::unique_ptr<Event>> CudaDevice::CreateEvent() { return CudaEvent::Create(); }

}  // namespace dmuond::kernels::cuda
