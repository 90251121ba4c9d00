// What stands in for the kernels of kernels/cuda where the fake driver stands in for a GPU: the CPU
// device's operations, computed by the workers of the fake driver's streams. Results have the bits
// of the CPU device.
#ifndef DMUOND_TESTS_FAKE_CUDA_DOUBLES_DOUBLES_H_
#define DMUOND_TESTS_FAKE_CUDA_DOUBLES_DOUBLES_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/cpu/cpu_device.h"
#include "tests/fake_cuda/driver/fake_cuda.h"

namespace dmuond::kernels::cuda {

// All memory that a kernel touches.
class Ranges {
 public:
  void Add(const void* address, size_t bytes, size_t alignment = 16) {
    if (address != nullptr) all_.push_back({address, bytes, alignment});
  }
  [[nodiscard]] const std::vector<FakeCudaRange>& all() const { return all_; }

 private:
  std::vector<FakeCudaRange> all_;
};

// Enqueues `compute`, which gets operations of the CPU and finds memory by OnWorker().
using Compute = std::function<absl::Status(Ops& ops, Stream& stream)>;
cudaError_t LaunchDouble(cudaStream_t stream, const char* name, const Ranges& ranges,
                         Compute compute);

template <typename T>
[[nodiscard]] T* OnWorker(T* address) {
  return address == nullptr ? nullptr : static_cast<T*>(fakeCudaAlias(address));
}

// Of the thread that calls.
[[nodiscard]] cpu::CpuDevice& CpuOfThread();

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_TESTS_FAKE_CUDA_DOUBLES_DOUBLES_H_
