#include "tests/fake_cuda/doubles/doubles.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/library_product.h"

namespace dmuond::kernels::cuda {

cpu::CpuDevice& CpuOfThread() {
  thread_local const std::unique_ptr<cpu::CpuDevice> device = *cpu::CpuDevice::Create(1);
  return *device;
}

cudaError_t LaunchDouble(cudaStream_t stream, const char* name, const Ranges& ranges,
                         Compute compute) {
  struct Kernel {
    const char* name;
    Compute compute;
  };
  const auto run = [](void* argument) {
    const std::unique_ptr<Kernel> kernel(static_cast<Kernel*>(argument));
    cpu::CpuDevice& device = CpuOfThread();
    const auto stream_of_cpu = *device.CreateStream();
    const absl::Status status = kernel->compute(device.ops(), *stream_of_cpu);
    if (status.ok()) return;
    std::fprintf(stderr, "%s: %s\n", kernel->name, std::string(status.message()).c_str());
    std::abort();
  };
  return static_cast<cudaError_t>(fakeCudaLaunch(stream, name, ranges.all().data(),
                                                 ranges.all().size(), run,
                                                 new Kernel{name, std::move(compute)}));
}

absl::Status CudaStatus(cudaError_t result, absl::string_view call) {
  if (result == cudaSuccess) return absl::OkStatus();
  const char* name = nullptr;
  cuGetErrorName(static_cast<CUresult>(result), &name);
  return absl::InternalError(absl::StrCat(call, " failed: ", name == nullptr ? "unknown" : name));
}

absl::Status CheckLibrary() {
  return absl::UnavailableError("libcublasLt.so does not run on the fake CUDA driver");
}
std::string LibraryVersion() { return ""; }

}  // namespace dmuond::kernels::cuda
