// Device memory by descriptor, streams and events.
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/cuda/cuda_memory.h"
#include "tests/kernels/cuda/gpu.h"

namespace dmuond::kernels::cuda {
namespace {

constexpr size_t kBytes = size_t{5} << 20;

class CudaMemory : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    holder_ = *CudaMemoryHolder::Create(0);
  }
  std::vector<uint16_t> Read(const Mapping& mapping, size_t bytes) {
    std::vector<uint16_t> host(bytes / 2, 0xFFFF);
    EXPECT_TRUE(gpu_->ops()
                    .Copy(*gpu_stream_, Bytes(host.data(), bytes), Bytes(mapping.data(), bytes))
                    .ok());
    Synchronize();
    return host;
  }
  void Write(const Mapping& mapping, const std::vector<uint16_t>& host) {
    const size_t bytes = host.size() * 2;
    EXPECT_TRUE(gpu_->ops()
                    .Copy(*gpu_stream_, Bytes(mapping.data(), bytes), Bytes(host.data(), bytes))
                    .ok());
    Synchronize();
  }
  std::unique_ptr<CudaMemoryHolder> holder_;
};

TEST_F(CudaMemory, ContentsOutliveMappings) {
  const UniqueFd fd = *holder_->Allocate(kBytes, "state");
  std::vector<uint16_t> values(kBytes / 2);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(i * 7);
  {
    const auto first = *gpu_->Map(fd.get(), kBytes);
    EXPECT_EQ(first->size(), kBytes);
    EXPECT_EQ(Read(*first, kBytes), std::vector<uint16_t>(kBytes / 2, 0)) << "not zero-filled";
    Write(*first, values);
  }
  const auto again = *gpu_->Map(fd.get(), kBytes);
  EXPECT_EQ(Read(*again, kBytes), values);
}

// What a job has freed holds its weights; the next job must find zeros.
TEST_F(CudaMemory, IsZeroAfterOthersHaveFreedIt) {
  const std::vector<uint16_t> secret(kBytes / 2, 0x1234);
  for (int round = 0; round < 8; ++round) {
    const UniqueFd fd = *holder_->Allocate(kBytes, "arena");
    const auto mapping = *gpu_->Map(fd.get(), kBytes);
    ASSERT_EQ(Read(*mapping, kBytes), std::vector<uint16_t>(kBytes / 2, 0)) << round;
    Write(*mapping, secret);
  }
}

TEST_F(CudaMemory, CheckKnowsDescriptorsAndSizes) {
  const UniqueFd fd = *holder_->Allocate(kBytes, "state");
  EXPECT_TRUE(holder_->Check(fd.get(), kBytes).ok());
  EXPECT_FALSE(holder_->Check(fd.get(), kBytes * 100).ok());
  EXPECT_FALSE(holder_->Check(fd.get(), kBytes / 5).ok()) << "such memory is mapped whole";
  const UniqueFd host(::memfd_create("host", MFD_CLOEXEC));
  EXPECT_FALSE(holder_->Check(host.get(), 4096).ok());
  EXPECT_FALSE(gpu_->Map(fd.get(), kBytes * 100).ok());
  EXPECT_FALSE(gpu_->Map(fd.get(), 0).ok());
}

TEST_F(CudaMemory, MemoryOfTheHostIsRefused) {
  const UniqueFd host(::memfd_create("table", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(host.get(), kBytes), 0);
  EXPECT_EQ(gpu_->Map(host.get(), kBytes).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(CudaMemory, RefusesWhatCannotBe) {
  EXPECT_EQ(holder_->Allocate(0, "nothing").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(holder_->Allocate(size_t{1} << 50, "everything").status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(holder_->Allocate(SIZE_MAX - 1, "everything").status().code(),
            absl::StatusCode::kResourceExhausted);
  const UniqueFd fd = *holder_->Allocate(kBytes, "state");
  EXPECT_EQ(gpu_->Map(fd.get(), SIZE_MAX - 1).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(CudaMemoryHolder::Create(1000).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(CudaDevice::Create(1000).status().code(), absl::StatusCode::kNotFound);
  EXPECT_NE(gpu_->Describe().find("uuid=GPU-"), std::string::npos) << gpu_->Describe();
}

TEST_F(CudaMemory, EventsOrderStreams) {
  const auto other = *gpu_->CreateStream();
  const auto scratch = *gpu_->AllocateScratch(kBytes * 16);
  const auto host = *gpu_->AllocateHost(kBytes * 16);
  const StridedBox box{scratch->data(), DType::kF32, 1, {static_cast<int64_t>(kBytes * 4)}, {1}};
  const auto filled = *gpu_->CreateEvent();
  const auto copied = *gpu_->CreateEvent();
  EXPECT_TRUE(*filled->Done());
  for (int round = 1; round <= 20; ++round) {
    const auto value = static_cast<float>(round);
    ASSERT_TRUE(gpu_->ops().Fill(*gpu_stream_, box, value).ok());
    ASSERT_TRUE(gpu_stream_->Record(*filled).ok());
    ASSERT_TRUE(other->WaitFor(*filled).ok());
    ASSERT_TRUE(
        gpu_->ops()
            .Copy(*other, Bytes(host->data(), host->size()), Bytes(scratch->data(), host->size()))
            .ok());
    ASSERT_TRUE(other->Record(*copied).ok());
    while (!*copied->Done()) {
    }
    EXPECT_TRUE(*filled->Done());
    ASSERT_EQ(reinterpret_cast<const float*>(host->data())[kBytes * 4 - 1], value);
  }
}

}  // namespace
}  // namespace dmuond::kernels::cuda
