// CopiesByEngine() against what the driver then does, as its log has it.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_memory.h"

namespace dmuond::kernels::cuda {
namespace {

constexpr size_t kBytes = size_t{1} << 20;

std::string LastLine(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string last;
  for (std::string line; std::getline(file, line);) last = line;
  return last;
}

TEST(EngineCopies, AreTheOnesThatTheDriverDoesByEngine) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("engine_copies_" + std::to_string(::getpid()));
  std::filesystem::create_directory(folder);
  ::setenv("FAKE_CUDA_LOG", folder.c_str(), 1);
  ::setenv("FAKE_CUDA_DEVICES", "2", 1);
  const auto device = *CudaDevice::Create(0);
  const auto stream = *device->CreateStream();
  const auto map = [&](int owner) {
    const UniqueFd fd = *(*CudaMemoryHolder::Create(owner))->Allocate(kBytes, "test");
    return *device->Map(fd.get(), kBytes);
  };
  const auto own = map(0);
  const auto other = map(0);
  const auto peer = map(1);
  const auto pinned = *device->AllocateHost(kBytes);
  constexpr size_t kPlaces = 4;
  std::byte* const memory[kPlaces] = {own->data(), other->data(), peer->data(), pinned->data()};
  const StridedBox run{nullptr, DType::kBF16, 1, {4096}, {1}};
  const StridedBox rows{nullptr, DType::kBF16, 2, {32, 128}, {200, 1}};
  const StridedBox columns{nullptr, DType::kBF16, 2, {32, 128}, {1, 40}};
  StridedBox wide = run;
  wide.dtype = DType::kF32;
  const std::pair<StridedBox, StridedBox> copies[] = {
      {run, run}, {rows, rows}, {rows, columns}, {wide, run}};
  int by_engine = 0;
  int by_kernel = 0;
  for (size_t to = 0; to < kPlaces; ++to) {
    for (size_t from = 0; from < kPlaces; ++from) {
      for (auto [dst, src] : copies) {
        if (to == from) continue;
        dst.data = memory[to];
        src.data = memory[from];
        const bool foretold = device->ops().CopiesByEngine(dst, src);
        ASSERT_TRUE(device->ops().Copy(*stream, dst, src).ok());
        ASSERT_TRUE(stream->Synchronize().ok());
        const std::string line = LastLine(folder / "device-0.log");
        EXPECT_EQ(line.find(" engine ") != std::string::npos, foretold) << line;
        ++(foretold ? by_engine : by_kernel);
      }
    }
  }
  // Runs and rows between the ten pairs of unlike owners; the rest needs kernels.
  EXPECT_EQ(by_engine, 20);
  EXPECT_EQ(by_kernel, 28);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace dmuond::kernels::cuda
