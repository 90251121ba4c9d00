// A GPU for tests that compare it with the CPU device: the same bytes on both, the same call on
// both, and the same bytes afterwards. Tests are skipped where there is none.
#ifndef DMUOND_TESTS_KERNELS_CUDA_GPU_H_
#define DMUOND_TESTS_KERNELS_CUDA_GPU_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/cpu/cpu_device.h"
#include "kernels/cuda/cuda_device.h"

namespace dmuond::kernels::cuda {

inline StridedBox Bytes(const void* data, size_t bytes) {
  // As bf16: any even number of bytes.
  return {const_cast<std::byte*>(static_cast<const std::byte*>(data)),
          DType::kBF16,
          1,
          {static_cast<int64_t>(bytes / 2)},
          {1}};
}

class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    auto device = CudaDevice::Create(0, engine_);
    if (!device.ok()) GTEST_SKIP() << device.status();
    gpu_ = *std::move(device);
    gpu_stream_ = *gpu_->CreateStream();
    cpu_ = *cpu::CpuDevice::Create(1);
    cpu_stream_ = *cpu_->CreateStream();
  }
  void TearDown() override {
    if (gpu_ != nullptr) Synchronize();
  }
  void Synchronize() {
    const absl::Status status = gpu_stream_->Synchronize();
    ASSERT_TRUE(status.ok()) << status;
  }

  // A host buffer's place on the device. The first 16 bytes have the host's alignment.
  class Twin {
   public:
    Twin(GpuTest& test, const void* host, size_t bytes)
        : test_(&test), host_(const_cast<void*>(host)), bytes_((bytes + 1) / 2 * 2) {
      shift_ = reinterpret_cast<uintptr_t>(host) % 16;
      memory_ = *test.gpu_->AllocateScratch(bytes_ + 32);
      const absl::Status status =
          test.gpu_->ops().Copy(*test.gpu_stream_, Bytes(data(), bytes_), Bytes(host, bytes_));
      EXPECT_TRUE(status.ok()) << status;
      test.Synchronize();
    }
    [[nodiscard]] std::byte* data() const { return memory_->data() + shift_; }
    template <typename T>
    [[nodiscard]] T* as() const {
      return reinterpret_cast<T*>(data());
    }
    // The place of an address of the host's buffer.
    [[nodiscard]] std::byte* At(const void* host) const {
      return data() + (static_cast<const std::byte*>(host) - static_cast<const std::byte*>(host_));
    }
    // What lies on the device now.
    [[nodiscard]] std::vector<std::byte> Read() const {
      std::vector<std::byte> bytes(bytes_);
      test_->Synchronize();
      const absl::Status status = test_->gpu_->ops().Copy(
          *test_->gpu_stream_, Bytes(bytes.data(), bytes_), Bytes(data(), bytes_));
      EXPECT_TRUE(status.ok()) << status;
      test_->Synchronize();
      return bytes;
    }
    template <typename T>
    [[nodiscard]] std::vector<T> ReadAs() const {
      const std::vector<std::byte> bytes = Read();
      std::vector<T> values(bytes.size() / sizeof(T));
      std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
      return values;
    }

   private:
    GpuTest* test_;
    void* host_;
    size_t bytes_;
    size_t shift_ = 0;
    std::unique_ptr<Mapping> memory_;
  };
  template <typename T>
  Twin Put(const std::vector<T>& host) {
    return Twin(*this, host.data(), host.size() * sizeof(T));
  }

  ProductEngine engine_ = ProductEngine::kDefault;
  std::unique_ptr<CudaDevice> gpu_;
  std::unique_ptr<Stream> gpu_stream_;
  std::unique_ptr<cpu::CpuDevice> cpu_;
  std::unique_ptr<Stream> cpu_stream_;
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_TESTS_KERNELS_CUDA_GPU_H_
