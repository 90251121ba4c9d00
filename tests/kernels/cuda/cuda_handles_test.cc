// Memory of another process by its 64-byte handle.
#include "kernels/cuda/cuda_handles.h"

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <string>

#include "tests/kernels/cuda/gpu.h"

namespace dmuond::kernels::cuda {
namespace {

constexpr size_t kBytes = size_t{8} << 20;
constexpr char kSocketVariable[] = "CUDA_HANDLES_TEST_SOCKET";

// Runs in the process that CudaHandles below starts: makes memory, sends its handle, stays.
TEST(HandleExporter, DISABLED_Exports) {
  ASSERT_NE(std::getenv(kSocketVariable), nullptr) << "is run by the tests below";
  const int socket = std::atoi(std::getenv(kSocketVariable));
  const auto device = *CudaDevice::Create(0);
  const auto stream = *device->CreateStream();
  const auto memory = *device->AllocateScratch(kBytes);
  const StridedBox box{memory->data(), DType::kF32, 1, {kBytes / 4}, {1}};
  ASSERT_TRUE(device->ops().Fill(*stream, box, 2.5F).ok());
  ASSERT_TRUE(stream->Synchronize().ok());
  const Driver& driver = **Driver::Get();
  CUipcMemHandle handle{};
  ASSERT_EQ(driver.ipc_get(&handle, reinterpret_cast<CUdeviceptr>(memory->data())), CUDA_SUCCESS);
  ASSERT_EQ(::send(socket, &handle, sizeof(handle), 0), static_cast<ssize_t>(sizeof(handle)));
  char byte = 0;
  ASSERT_EQ(::recv(socket, &byte, 1, 0), 0) << "until the test is over";
}

class CudaHandlesTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), 0);
    exporter_ = ::fork();
    if (exporter_ == 0) {
      ::close(ends[0]);
      ::setenv(kSocketVariable, std::to_string(ends[1]).c_str(), 1);
      ::execl("/proc/self/exe", "exporter", "--gtest_filter=HandleExporter.*",
              "--gtest_also_run_disabled_tests", nullptr);
      ::_exit(127);
    }
    ::close(ends[1]);
    socket_ = ends[0];
    memory_.handle.resize(sizeof(CUipcMemHandle));
    ASSERT_EQ(::recv(socket_, memory_.handle.data(), memory_.handle.size(), 0),
              static_cast<ssize_t>(memory_.handle.size()));
    memory_.device_uuid = UuidOf(**Driver::Get(), 0);
    memory_.bytes = kBytes;
    memory_.buffer = 7;
    memory_.generation = 1;
  }
  void TearDown() override {
    EndExporter();
    GpuTest::TearDown();
  }
  void EndExporter() {
    if (exporter_ <= 0) return;
    ::kill(exporter_, SIGKILL);
    ::waitpid(exporter_, nullptr, 0);
    ::close(socket_);
    exporter_ = -1;
  }
  float First(const Mapping& mapping) {
    std::vector<float> host(4);
    EXPECT_TRUE(
        gpu_->ops().Copy(*gpu_stream_, Bytes(host.data(), 16), Bytes(mapping.data(), 16)).ok());
    Synchronize();
    return host[0];
  }
  absl::StatusCode Refusal(HandleMemory memory) { return gpu_->MapHandle(memory).status().code(); }

  pid_t exporter_ = -1;
  int socket_ = -1;
  HandleMemory memory_;
};

TEST_F(CudaHandlesTest, PartsOfAnAllocationAreMappedAndOutliveItsProcess) {
  const auto whole = *gpu_->MapHandle(memory_);
  HandleMemory part = memory_;
  part.offset = 4096;
  part.bytes = 64;
  const auto slice = *gpu_->MapHandle(part);
  EXPECT_EQ(slice->data(), whole->data() + 4096);
  EXPECT_EQ(slice->size(), 64);
  EXPECT_EQ(First(*slice), 2.5F);
  EndExporter();
  EXPECT_EQ(First(*whole), 2.5F);
}

TEST_F(CudaHandlesTest, AnotherGenerationIsOpenedWhenTheOldOneIsUnmapped) {
  HandleMemory next = memory_;
  next.generation = 2;
  {
    const auto old = *gpu_->MapHandle(memory_);
    EXPECT_EQ(Refusal(next), absl::StatusCode::kFailedPrecondition);
  }
  EXPECT_EQ(First(**gpu_->MapHandle(next)), 2.5F);
}

TEST_F(CudaHandlesTest, WrongPartsAndHandlesAreRefused) {
  HandleMemory wrong = memory_;
  wrong.handle.pop_back();
  EXPECT_EQ(Refusal(wrong), absl::StatusCode::kInvalidArgument);
  wrong = memory_;
  wrong.offset = 8;
  wrong.bytes = 16;
  EXPECT_EQ(Refusal(wrong), absl::StatusCode::kInvalidArgument);
  wrong = memory_;
  wrong.offset = 16;
  EXPECT_EQ(Refusal(wrong), absl::StatusCode::kOutOfRange);
  wrong.bytes = SIZE_MAX - 8;
  EXPECT_EQ(Refusal(wrong), absl::StatusCode::kOutOfRange);
  wrong = memory_;
  wrong.device_uuid = "GPU-00000000-0000-0000-0000-000000000000";
  EXPECT_EQ(Refusal(wrong), absl::StatusCode::kNotFound);
  EndExporter();
  EXPECT_EQ(Refusal(memory_), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dmuond::kernels::cuda
