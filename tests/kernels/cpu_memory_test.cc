#include "kernels/cpu/cpu_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "kernels/cpu/cpu_device.h"

namespace dmuond::kernels::cpu {
namespace {

constexpr size_t kBytes = 3 * 4096 + 100;

TEST(CpuMemory, IsZeroSharedAndOutlivesItsDescriptor) {
  CpuMemoryHolder holder;
  absl::StatusOr<UniqueFd> fd = holder.Allocate(kBytes, "state");
  ASSERT_TRUE(fd.ok()) << fd.status();
  auto device = CpuDevice::Create(1);
  ASSERT_TRUE(device.ok());
  auto first = (*device)->Map(fd->get(), kBytes);
  auto second = (*device)->Map(fd->get(), kBytes);
  ASSERT_TRUE(first.ok() && second.ok());
  fd->Reset();
  EXPECT_TRUE(std::all_of((*first)->data(), (*first)->data() + kBytes,
                          [](std::byte b) { return b == std::byte{0}; }));
  (*first)->data()[kBytes - 1] = std::byte{42};
  EXPECT_EQ((*second)->data()[kBytes - 1], std::byte{42});
  EXPECT_EQ((*second)->size(), kBytes);
}

TEST(CpuMemory, CannotBeResizedByWhoeverHoldsTheDescriptor) {
  CpuMemoryHolder holder;
  absl::StatusOr<UniqueFd> fd = holder.Allocate(kBytes, "state");
  ASSERT_TRUE(fd.ok());
  EXPECT_EQ(::ftruncate(fd->get(), 1), -1);
  EXPECT_EQ(::ftruncate(fd->get(), 2 * kBytes), -1);
  EXPECT_EQ(::fcntl(fd->get(), F_ADD_SEALS, F_SEAL_WRITE), -1);
  EXPECT_TRUE(holder.Check(fd->get(), kBytes).ok());
}

TEST(CpuMemory, ImpossibleSizesAreRefusedWithBothNumbers) {
  CpuMemoryHolder holder;
  EXPECT_EQ(holder.Allocate(0, "state").status().code(), absl::StatusCode::kInvalidArgument);
  const auto huge = holder.Allocate(size_t{1} << 60, "state").status();
  EXPECT_EQ(huge.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(huge.message().find("1152921504606846976"), huge.message().npos) << huge;
  absl::StatusOr<UniqueFd> fd = holder.Allocate(kBytes, "state");
  ASSERT_TRUE(fd.ok());
  EXPECT_EQ(holder.Check(fd->get(), kBytes + 1).code(), absl::StatusCode::kOutOfRange);
  auto device = CpuDevice::Create(1);
  EXPECT_EQ((*device)->Map(fd->get(), kBytes + 1).status().code(), absl::StatusCode::kOutOfRange);
}

TEST(CpuMemory, DescriptorsThatCouldShrinkOrAreNoMemoryAreRefused) {
  CpuMemoryHolder holder;
  const UniqueFd open(::memfd_create("open", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(open.get(), kBytes), 0);
  EXPECT_EQ(holder.Check(open.get(), kBytes).code(), absl::StatusCode::kFailedPrecondition);
  const UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  EXPECT_EQ(holder.Check(null.get(), 1).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(holder.Check(-1, 1).ok());
}

TEST(CpuDevice, RefusesThreadCountsThatMakeNoSense) {
  EXPECT_FALSE(CpuDevice::Create(0).ok());
  EXPECT_FALSE(CpuDevice::Create(-3).ok());
  EXPECT_FALSE(CpuDevice::Create(CpuDevice::kThreadsMax + 1).ok());
}

}  // namespace
}  // namespace dmuond::kernels::cpu
