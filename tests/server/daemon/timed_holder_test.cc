#include "server/daemon/memory/timed_holder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <latch>
#include <string>
#include <thread>

#include "kernels/cpu/cpu_memory.h"
#include "server/common/errors.h"

namespace dmuond::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Memory of a driver that hangs until a test wants it to go on.
class HangingMemory final : public kernels::MemoryHolder {
 public:
  absl::StatusOr<wire::UniqueFd> Allocate(size_t bytes, const std::string& name) override {
    go_on_.wait();
    return memory_.Allocate(bytes, name);
  }
  absl::Status Check(int fd, size_t bytes) override { return memory_.Check(fd, bytes); }
  void GoOn() { go_on_.count_down(); }

 private:
  kernels::cpu::CpuMemoryHolder memory_;
  std::latch go_on_{1};
};

TEST(TimedHolderTest, ADriverThatHangsFailsWhoWaitsAndNobodyElseWaits) {
  const auto memory = std::make_shared<HangingMemory>();
  TimedHolder holder("gpu 7", memory, std::chrono::milliseconds(150));
  const absl::Status status = holder.Allocate(4096, "state").status();
  EXPECT_EQ(ReasonOf(status), "DEVICE_HANGS");
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("'state'"), HasSubstr("4096 bytes of gpu 7"), HasSubstr("150 ms")));
  EXPECT_TRUE(holder.hangs());
  // The next one is not made to wait as long for the same device: no thread of its own hangs there.
  EXPECT_EQ(ReasonOf(holder.Allocate(8192, "staging").status()), "DEVICE_HANGS");
  memory->GoOn();
  while (holder.hangs()) std::this_thread::yield();
  const absl::StatusOr<wire::UniqueFd> fd = holder.Allocate(4096, "state");
  ASSERT_TRUE(fd.ok()) << fd.status();
  EXPECT_TRUE(holder.Check(fd->get(), 4096).ok());
}

TEST(TimedHolderTest, ErrorsOfTheHolderComeThrough) {
  TimedHolder holder("gpu 7", std::make_shared<kernels::cpu::CpuMemoryHolder>(),
                     std::chrono::seconds(30));
  EXPECT_TRUE(absl::IsInvalidArgument(holder.Allocate(0, "nothing").status()));
  EXPECT_FALSE(holder.hangs());
}

}  // namespace
}  // namespace dmuond::server
