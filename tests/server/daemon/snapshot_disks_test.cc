#include "server/daemon/snapshots/snapshot_disks.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <string>

#include "base/mutex.h"
#include "scheduler/job/node_actions.h"
#include "server/storage/posix_storage.h"
#include "server/storage/snapshot_store.h"
#include "tests/server/daemon/support.h"
#include "tests/server/storage/snapshots.h"

namespace dmuond::server {
namespace {

using storage::testing::IdAt;
using storage::testing::kJob;

// A directory with snapshots of steps 1 and 2, whose threads can be held up.
class SnapshotDisksTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string folder = std::filesystem::temp_directory_path() / "snapshot_disks_XXXXXX";
    ASSERT_NE(::mkdtemp(folder.data()), nullptr);
    folder_ = folder;
    auto storage = storage::OpenPosixStorage(folder);
    ASSERT_TRUE(storage.ok()) << storage.status();
    storage_ = *std::move(storage);
    const storage::testing::Job job = storage::testing::MakeJob(2, 1, 2);
    for (const int64_t step : {1, 2}) {
      ASSERT_TRUE(storage::testing::Save(*storage_, job, step).ok());
    }
    SnapshotDisks::Events events;
    events.enter = [this](const std::function<void()>& event) {
      MutexLock lock(mutex_);
      event();
    };
    disks_ = std::make_unique<SnapshotDisks>(
        SnapshotDisks::Options{.timeout = std::chrono::milliseconds(kPatience)}, storage_.get(),
        std::move(events));
  }
  void TearDown() override {
    for (Disk* disk : {disks_->reads(), disks_->writes()}) {
      EXPECT_TRUE(disk->Stop(std::chrono::steady_clock::now() + kPatience));
    }
    std::filesystem::remove_all(folder_);
  }

  // Holds both threads up while `orders` gives its orders; returns when they have been carried out.
  void WhileBothHang(const std::function<void()>& orders) {
    std::promise<void> answers;
    const std::shared_future<void> answered = answers.get_future().share();
    for (Disk* disk : {disks_->reads(), disks_->writes()}) {
      disk->Post([answered] { answered.wait(); });
    }
    {
      MutexLock lock(mutex_);
      orders();
    }
    answers.set_value();
    for (Disk* disk : {disks_->reads(), disks_->writes()}) {
      std::promise<void> through;
      disk->Post([&] { through.set_value(); });
      through.get_future().wait();
    }
  }
  void SetAsideAfterTheFirst() {
    disks_->SetAside(scheduler::node::SetSnapshotsAside{.after = IdAt(1)}, kJob);
  }
  int64_t NewestStep() {
    auto store = storage::SnapshotStore::Create(*storage_, kJob);
    return store->Newest().value()->id.step.value();
  }

  std::filesystem::path folder_;
  std::unique_ptr<storage::Storage> storage_;
  Mutex mutex_;  // the daemon's
  std::unique_ptr<SnapshotDisks> disks_;
};

TEST_F(SnapshotDisksTest, AJobThatGoesBackSetsNewerSnapshotsAside) {
  WhileBothHang([&] { SetAsideAfterTheFirst(); });
  EXPECT_EQ(NewestStep(), 1);
}

// A job of the same name may go on from them on other nodes by then.
TEST_F(SnapshotDisksTest, OneThatIsNoMoreSetsNoneAsideWhenTheDirectoryAnswersAgain) {
  WhileBothHang([&] {
    SetAsideAfterTheFirst();
    disks_->Keep();
  });
  EXPECT_EQ(NewestStep(), 2);
}

TEST_F(SnapshotDisksTest, TheNextJobGoesBackAsEver) {
  WhileBothHang([&] {
    SetAsideAfterTheFirst();
    disks_->Keep();
    SetAsideAfterTheFirst();
  });
  EXPECT_EQ(NewestStep(), 1);
}

}  // namespace
}  // namespace dmuond::server
