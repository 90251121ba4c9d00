// main() of the lanes' tests on the fake driver: their lanes are dmuond-lane-fake, one device each,
// state, staging and arenas are memory of these devices.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>

#include "kernels/cpu/cpu_memory.h"
#include "kernels/cuda/cuda_memory.h"
#include "tests/server/lane/harness.h"

namespace dmuond::server::lane::testing {
namespace {

// Seen by the test through a door that a real driver does not have.
Held Allocate(size_t bytes, int32_t lane) {
  Held held;
  auto holder = kernels::cuda::CudaMemoryHolder::Create(lane);
  EXPECT_TRUE(holder.ok()) << holder.status();
  auto fd = (*holder)->Allocate(bytes, "test");
  EXPECT_TRUE(fd.ok()) << fd.status();
  held.fd = *std::move(fd);
  const std::string path = "/proc/self/fd/" + std::to_string(held.fd.get());
  const wire::UniqueFd writable(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  auto mapping = kernels::cpu::MapShared(writable.get(), bytes);
  EXPECT_TRUE(mapping.ok()) << mapping.status();
  held.mapping = *std::move(mapping);
  return held;
}

}  // namespace
}  // namespace dmuond::server::lane::testing

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  ::setenv("FAKE_CUDA_DEVICES", "4", 0);
  dmuond::server::lane::testing::OtherDevice() = {
      "dmuond-lane-fake", [](int32_t lane) { return "cuda:" + std::to_string(lane); },
      dmuond::server::lane::testing::Allocate};
  return RUN_ALL_TESTS();
}
