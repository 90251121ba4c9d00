// A daemon under a limit of the size of files (ulimit -f), which the job's memory counts as, too.
#include <sys/resource.h>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "tests/client/daemon_test.h"
#include "tests/server/system/expect_error.h"
#include "tests/server/system/raw_trainer.h"

namespace dmuond::testing {
namespace {

class FileSizeLimitTest : public DaemonTest {
 protected:
  void SetUp() override { StartDaemon({}); }

  // Limits the size of files that the daemon writes, and the lanes that it starts from now on.
  void Limit(rlim_t bytes) {
    const rlimit limit{bytes, RLIM_INFINITY};
    ASSERT_EQ(::prlimit(daemon_->pid(), RLIMIT_FSIZE, &limit, nullptr), 0);
  }
};

TEST_F(FileSizeLimitTest, AJobBeyondItIsRefusedWithTheCauseAndTheDaemonGoesOn) {
  Limit(0);
  {
    RawTrainer trainer(daemon_->address());
    absl::Status status = trainer.Open(0, 1);
    if (status.ok()) status = trainer.Register();
    if (status.ok()) status = trainer.Attach();
    ExpectRefused(status,
                  {absl::StatusCode::kFailedPrecondition, "MEMORY_EXHAUSTED", {"File too large"}});
  }
  Limit(RLIM_INFINITY);
  RawTrainer trainer(daemon_->address());
  absl::Status status = trainer.Open(0, 1);
  if (status.ok()) status = trainer.Register();
  if (status.ok()) status = trainer.Attach();
  if (status.ok()) status = trainer.Push();
  if (status.ok()) status = trainer.Step(1);
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dmuond::testing
