// What the fake driver does beyond the statements of contracts/: it ends a process that does what
// must never be done, makes kernels fail, and writes down what ran.
#include "tests/fake_cuda/driver/fake_cuda.h"

#include <cuda.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace dmuond {
namespace {

constexpr size_t kBytes = size_t{4} << 20;

void Must(CUresult result) {
  const char* name = nullptr;
  cuGetErrorName(result, &name);
  ASSERT_EQ(result, CUDA_SUCCESS) << (name == nullptr ? "unknown" : name);
}

void UseContext(int device = 0) {
  Must(cuInit(0));
  CUcontext context = nullptr;
  Must(cuDevicePrimaryCtxRetain(&context, device));
  Must(cuCtxSetCurrent(context));
}

CUdeviceptr Map(int device = 0) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  CUmemGenericAllocationHandle handle = 0;
  Must(cuMemCreate(&handle, kBytes, &properties, 0));
  CUdeviceptr address = 0;
  Must(cuMemAddressReserve(&address, kBytes, 0, 0, 0));
  Must(cuMemMap(address, kBytes, 0, handle, 0));
  CUmemAccessDesc access{};
  access.location = properties.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  Must(cuMemSetAccess(address, kBytes, &access, 1));
  return address;
}

CUstream MakeStream() {
  CUstream stream = nullptr;
  Must(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  return stream;
}

// Nothing in the stream goes on.
void Block(CUstream stream) {
  void* word = nullptr;
  Must(cuMemHostAlloc(&word, 8, 0));
  *static_cast<uint64_t*>(word) = 0;
  Must(cuStreamWaitValue64(stream, reinterpret_cast<CUdeviceptr>(word), 1,
                           CU_STREAM_WAIT_VALUE_GEQ));
}

void Nothing(void*) {}
CUresult Launch(CUstream stream, CUdeviceptr address) {
  const FakeCudaRange range{reinterpret_cast<const void*>(address), 64, 16};
  return fakeCudaLaunch(stream, "nothing", &range, 1, Nothing, nullptr);
}

// Each test is a process of its own, whose driver is new.
class FakeCudaDeathTest : public testing::Test {
 protected:
  void SetUp() override {
    testing::FLAGS_gtest_death_test_style = "threadsafe";
    ::setenv("FAKE_CUDA_DEVICES", "2", 1);
  }
};

TEST_F(FakeCudaDeathTest, UnmappingUnderQueuedWork) {
  EXPECT_DEATH(
      {
        UseContext();
        const CUdeviceptr memory = Map();
        CUstream stream = MakeStream();
        Block(stream);
        Must(cuMemsetD32Async(memory + 4096, 1, 16, stream));
        cuMemUnmap(memory, kBytes);
      },
      "cuMemUnmap of .* which queued work uses: cuMemsetD32Async");
}

TEST_F(FakeCudaDeathTest, UnregisteringUnderQueuedWork) {
  EXPECT_DEATH(
      {
        UseContext();
        static uint64_t words[16];
        Must(cuMemHostRegister(words, sizeof(words), 0));
        CUstream stream = MakeStream();
        Block(stream);
        Must(cuStreamWriteValue64(stream, reinterpret_cast<CUdeviceptr>(words), 1, 0));
        cuMemHostUnregister(words);
      },
      "cuMemHostUnregister of .* which queued work uses: cuStreamWriteValue64");
}

TEST_F(FakeCudaDeathTest, TheHostAtADeviceAddress) {
  EXPECT_EXIT(
      {
        UseContext();
        *reinterpret_cast<volatile int*>(Map()) = 1;
      },
      [](int status) { return status != 0; }, "");
}

TEST_F(FakeCudaDeathTest, WorkForAnotherDevicesStream) {
  EXPECT_DEATH(
      {
        UseContext(1);
        CUstream stream = MakeStream();
        UseContext(0);
        cuMemsetD32Async(Map(), 1, 16, stream);
      },
      "work for a stream of device 1 in the context of device 0");
}

TEST_F(FakeCudaDeathTest, KernelsWithMisalignedAddresses) {
  EXPECT_DEATH(
      {
        UseContext();
        Launch(MakeStream(), Map() + 8);
      },
      "nothing gets the address .* no multiple of 16");
}

TEST_F(FakeCudaDeathTest, ContextsWhereNoneMayBe) {
  std::string program;
  std::ifstream("/proc/self/comm") >> program;
  ::setenv("FAKE_CUDA_NO_CONTEXT", program.c_str(), 1);
  EXPECT_DEATH(UseContext(), "CUDA_MPS_PIPE_DIRECTORY='', which is no empty folder");
  std::string folder = std::filesystem::temp_directory_path() / "fake_cuda_no_mps_XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  ::setenv("CUDA_MPS_PIPE_DIRECTORY", folder.c_str(), 1);
  EXPECT_DEATH(UseContext(), "asks for a context of device 0, and may have none");
  EXPECT_EXIT(
      {
        Must(cuInit(0));
        Map();
        std::exit(0);
      },
      testing::ExitedWithCode(0), "");
  ::unsetenv("FAKE_CUDA_NO_CONTEXT");
  ::unsetenv("CUDA_MPS_PIPE_DIRECTORY");
  std::filesystem::remove(folder);
}

// Error 700 from the second kernel on, for everything.
TEST_F(FakeCudaDeathTest, KernelsFailWhereTold) {
  ::setenv("FAKE_CUDA_FAULT_KERNEL", "2", 1);
  EXPECT_EXIT(
      {
        UseContext();
        const CUdeviceptr memory = Map();
        CUstream stream = MakeStream();
        Must(Launch(stream, memory));
        Must(cuStreamSynchronize(stream));
        Must(Launch(stream, memory));
        const bool failed = cuStreamSynchronize(stream) == CUDA_ERROR_ILLEGAL_ADDRESS &&
                            cuMemsetD32Async(memory, 1, 16, stream) == CUDA_ERROR_ILLEGAL_ADDRESS;
        std::exit(failed ? 7 : 1);
      },
      testing::ExitedWithCode(7), "");
  ::unsetenv("FAKE_CUDA_FAULT_KERNEL");
}

TEST_F(FakeCudaDeathTest, MemoryIsCountedAsLongAsSomebodyHoldsIt) {
  ::setenv("FAKE_CUDA_MEMORY_MIB", "6", 1);
  EXPECT_EXIT(
      {
        UseContext();
        size_t free_bytes = 0;
        size_t total = 0;
        CUdeviceptr memory = 0;
        Must(cuMemAlloc(&memory, kBytes));
        CUdeviceptr more = 0;
        const bool refused = cuMemAlloc(&more, kBytes) == CUDA_ERROR_OUT_OF_MEMORY;
        Must(cuMemFree(memory));
        Must(cuMemGetInfo(&free_bytes, &total));
        std::exit(refused && free_bytes == total && total == size_t{6} << 20 ? 7 : 1);
      },
      testing::ExitedWithCode(7), "");
  ::unsetenv("FAKE_CUDA_MEMORY_MIB");
}

TEST_F(FakeCudaDeathTest, WhatRanIsWrittenDown) {
  // The process that dies runs this test again.
  const char* told = std::getenv("FAKE_CUDA_LOG");
  const std::filesystem::path folder =
      told != nullptr
          ? told
          : std::filesystem::temp_directory_path() / ("fake_cuda_" + std::to_string(::getpid()));
  std::filesystem::create_directory(folder);
  ::setenv("FAKE_CUDA_LOG", folder.c_str(), 1);
  EXPECT_EXIT(
      {
        UseContext(1);
        const CUdeviceptr memory = Map(1);
        void* host = nullptr;
        Must(cuMemHostAlloc(&host, kBytes, 0));
        CUstream stream = MakeStream();
        Must(Launch(stream, memory));
        Must(cuMemcpyAsync(memory, reinterpret_cast<CUdeviceptr>(host), kBytes, stream));
        Must(cuStreamSynchronize(stream));
        std::exit(0);
      },
      testing::ExitedWithCode(0), "");
  ::unsetenv("FAKE_CUDA_LOG");
  std::ifstream file(folder / "device-1.log");
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  ASSERT_EQ(lines.size(), 2);
  EXPECT_NE(lines[0].find(" kernel nothing bytes=64"), std::string::npos) << lines[0];
  EXPECT_NE(lines[1].find(" engine cuMemcpyAsync bytes=4194304"), std::string::npos) << lines[1];
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace dmuond
