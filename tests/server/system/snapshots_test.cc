// Snapshots of running jobs: when they are made, what is kept, what trainers are told of them.
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/storage/manifest.h"
#include "server/storage/posix_storage.h"
#include "server/storage/snapshot_reader.h"
#include "server/storage/snapshot_store.h"
#include "server/storage/trainers_file.h"
#include "tests/client/daemon_group.h"
#include "tests/client/daemon_process.h"
#include "tests/server/system/daemon_status.h"
#include "tests/server/system/snapshot_world.h"

namespace dmuond::testing {
namespace {

using server::storage::SnapshotEntry;
using server::storage::SnapshotState;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class SnapshotsTest : public ::testing::Test {
 protected:
  void TearDown() override {
    if (HasFailure() && daemon_ != nullptr) std::cerr << daemon_->Log();
  }
  void Start(std::vector<std::string> flags, const std::string& devices = "cpu:2") {
    flags.push_back("--threads=1");
    auto daemon = DaemonProcess::Start({.devices = devices, .flags = std::move(flags)});
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    status_ = std::make_unique<DaemonStatus>(daemon_->address());
  }
  [[nodiscard]] std::string Dir() const { return "--snapshot_dir=" + directory_.path(); }
  bool WaitDurable(int64_t step) {
    return status_->WaitFor([step](const v1::GetStatusReply& reply) {
      return reply.job().has_durable_step() && reply.job().durable_step() >= step;
    });
  }
  // Steps of the job's whole snapshots, newest first; every byte is looked at.
  std::vector<int64_t> WholeSteps() {
    auto storage = server::storage::OpenPosixStorage(directory_.path());
    EXPECT_TRUE(storage.ok()) << storage.status();
    auto store = server::storage::SnapshotStore::Create(**storage, "run7");
    auto entries = store->List();
    EXPECT_TRUE(entries.ok()) << entries.status();
    std::vector<int64_t> steps;
    for (const SnapshotEntry& entry : *entries) {
      EXPECT_NE(entry.state, SnapshotState::kBroken) << entry.problem;
      if (entry.state != SnapshotState::kDurable) continue;
      steps.push_back(entry.id.step.value());
      auto reader = server::storage::SnapshotReader::Open(**storage, entry.manifest);
      EXPECT_TRUE(reader.ok()) << reader.status();
      const absl::Status whole = (*reader)->VerifyAll([](int64_t) { return true; });
      EXPECT_TRUE(whole.ok()) << whole;
      auto states = server::storage::ReadTrainerStates(**storage, entry.manifest);
      EXPECT_TRUE(states.ok()) << states.status();
      for (const auto& [rank, state] : *states) {
        EXPECT_EQ(state, SnapshotWorld::StateOf(rank.value(), entry.id.step.value()));
      }
      EXPECT_EQ(states->size(), 2);
    }
    return steps;
  }

  // In its manifest.
  void SayThatTheNewestTook(const std::string& time) {
    auto storage = server::storage::OpenPosixStorage(directory_.path());
    auto store = server::storage::SnapshotStore::Create(**storage, "run7");
    const auto newest = store->Newest();
    const std::string file =
        absl::StrCat(directory_.path(), "/", store->PathOf((**newest).id), "/manifest.json");
    std::ifstream in(file);
    std::string text(std::istreambuf_iterator<char>(in), {});
    const size_t at = text.find("\"took\": \"") + 9;
    text.replace(at, text.find('"', at) - at, time);
    ASSERT_TRUE(server::storage::SealManifest(text).ok());
    std::ofstream(file) << text;
  }

  // By dmuonctl: its exit code, and what it says, which goes to a file named `what`.
  std::pair<int, std::string> Save(const DaemonProcess& daemon, const std::string& what) {
    const std::string output = directory_.path() + "/" + what;
    auto ctl = ChildProcess::Start("dmuonctl",
                                   {"--address=" + daemon.address(), "snapshot", "save"}, output);
    EXPECT_TRUE(ctl.ok()) << ctl.status();
    const int code = (*ctl)->Wait(std::chrono::seconds(30));
    std::ifstream file(output);
    return {code, std::string(std::istreambuf_iterator<char>(file), {})};
  }

  ScratchDirectory directory_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<DaemonStatus> status_;
};

TEST_F(SnapshotsTest, AreMadeEverySoManyStepsAndTheNewestTwoAreKept) {
  Start({Dir(), "--snapshot_every_steps=2"});
  SnapshotWorld world({daemon_->address()}, {});
  ASSERT_TRUE(world.Start().ok());
  EXPECT_FALSE(world[0].durable_step().has_value());
  for (int64_t step = 2; step <= 8; step += 2) {
    ASSERT_TRUE(world.StepUntil(step));
    ASSERT_TRUE(WaitDurable(step));
  }
  EXPECT_THAT(WholeSteps(), ElementsAre(8, 6));
  ASSERT_TRUE(world.StepUntil(9));
  EXPECT_EQ(world[1].durable_step(), 8) << "the outcome says it";
  const v1::GetStatusReply status = status_->Get();
  EXPECT_EQ(status.job().snapshots_left_out(), 0);
  int64_t bytes = 0;
  for (const auto& file : std::filesystem::recursive_directory_iterator(directory_.path())) {
    const std::string path = file.path().string();
    const bool newest = path.find("step-000000000008.") != std::string::npos;
    if (newest && file.path().extension() == ".safetensors") {
      bytes += static_cast<int64_t>(file.file_size());
    }
  }
  EXPECT_EQ(status.job().snapshot_bytes(), bytes);
  EXPECT_GT(status.job().snapshot_ms(), 0);
  EXPECT_GT(status.lanes(0).copy_bytes(), 0);
  world.Close();
  EXPECT_THAT(daemon_->Log(), Not(HasSubstr("the last snapshot"))) << "there was none";
  // Whoever chooses grace periods finds how long they take.
  EXPECT_THAT(daemon_->Log(), ContainsRegex("snapshot written.* step=8 took_s=[0-9.e-]+"));
  SayThatTheNewestTook("3600s");
  Start({Dir()});
  EXPECT_THAT(daemon_->Log(),
              ContainsRegex("level=warn msg=.the last snapshot took longer than a daemon that "
                            "leaves has.* job=run7 step=8 bytes=[0-9]+ took_s=3600 "
                            "drain_timeout_s=45"));
}

TEST_F(SnapshotsTest, AreMadeAfterSomeTimeWhateverTheSteps) {
  Start({Dir(), "--snapshot_every_steps=0", "--snapshot_every=1ms"});
  SnapshotWorld world({daemon_->address()}, {});
  ASSERT_TRUE(world.Start().ok());
  ASSERT_TRUE(world.StepUntil(1));
  EXPECT_TRUE(WaitDurable(1));
  world.Close();
}

TEST_F(SnapshotsTest, WithoutADirectoryAJobWarnsAndHasNoDurableStep) {
  Start({});
  SnapshotWorld world({daemon_->address()}, {});
  ASSERT_TRUE(world.Start().ok());
  ASSERT_TRUE(world.StepUntil(2));
  EXPECT_FALSE(world[0].durable_step().has_value());
  EXPECT_THAT(daemon_->Log(), HasSubstr("no snapshots are made"));
  world.Close();
}

// Two groups by mistake, with one directory and one name of a job.
TEST_F(SnapshotsTest, OneThatIsOlderThanAnotherGroupsIsRefusedAndTheOtherStays) {
  Start({Dir()});
  auto other = DaemonProcess::Start({.flags = {Dir(), "--threads=1"}});
  ASSERT_TRUE(other.ok()) << other.status();
  SnapshotWorld world({daemon_->address()}, {});
  SnapshotWorld others({(*other)->address()}, {});
  ASSERT_TRUE(world.Start().ok());
  ASSERT_TRUE(others.Start().ok());
  ASSERT_TRUE(world.StepUntil(3));
  ASSERT_TRUE(others.StepUntil(5));
  EXPECT_EQ(Save(**other, "others").first, 0);
  const auto [code, text] = Save(*daemon_, "own");
  EXPECT_NE(code, 0);
  EXPECT_THAT(text, AllOf(HasSubstr("another group writes snapshots of a job of this name"),
                          HasSubstr("SNAPSHOT_FAILED")));
  EXPECT_THAT(WholeSteps(), ElementsAre(5));
  world.Close();
  others.Close();
}

TEST_F(SnapshotsTest, OneThatIsAskedForExistsWhenTheCallReturns) {
  Start({Dir()});
  SnapshotWorld world({daemon_->address()}, {});
  const auto save = [&](const std::string& what) { return Save(*daemon_, what); };
  EXPECT_NE(save("none").first, 0);
  ASSERT_TRUE(world.Start().ok());
  const auto early = save("early");
  EXPECT_NE(early.first, 0);
  EXPECT_THAT(early.second, HasSubstr("no step has been committed"));
  ASSERT_TRUE(world.StepUntil(3));
  const auto third = save("third");
  EXPECT_EQ(third.first, 0) << third.second;
  EXPECT_THAT(third.second, HasSubstr("step 3"));
  EXPECT_THAT(WholeSteps(), ElementsAre(3));
  EXPECT_EQ(save("again").first, 0);
  EXPECT_THAT(WholeSteps(), ElementsAre(3)) << "it is there already";
  world.Close();
}

TEST_F(SnapshotsTest, ADaemonThatIsToldToLeaveSavesTheLastStep) {
  Start({Dir()});
  SnapshotWorld world({daemon_->address()}, {});
  ASSERT_TRUE(world.Start().ok());
  ASSERT_TRUE(world.StepUntil(3));
  EXPECT_EQ(daemon_->Stop(), 0);
  EXPECT_THAT(WholeSteps(), ElementsAre(3));
}

// Of node 1, with what it was given for the directory.
std::string WhyNotTaken(const std::vector<std::string>& first,
                        const std::vector<std::string>& second) {
  const std::string coordinator = FreeAddress();
  DaemonGroup group;
  for (const int node : {0, 1}) {
    std::vector<std::string> flags = GroupFlags(node, 2, coordinator);
    const std::vector<std::string>& more = node == 0 ? first : second;
    flags.insert(flags.end(), more.begin(), more.end());
    auto daemon = DaemonProcess::Start({.flags = std::move(flags), .wait_for = "live"});
    EXPECT_TRUE(daemon.ok()) << daemon.status();
    group.push_back(*std::move(daemon));
  }
  const std::string refusal = "the coordinator refuses this daemon";
  if (!group[1]->WaitLogged(refusal)) return "it was not refused";
  EXPECT_FALSE(group[0]->WaitServing("ready", std::chrono::milliseconds(1)).ok());
  const std::string log = group[1]->Log();
  return log.substr(log.find(refusal));
}

TEST(SnapshotDirectoryTest, WhoSeesAnotherDirectoryIsNotTakenIntoTheGroup) {
  const ScratchDirectory here;
  const ScratchDirectory there;
  EXPECT_THAT(WhyNotTaken({"--snapshot_dir=" + here.path()}, {"--snapshot_dir=" + there.path()}),
              AllOf(HasSubstr("node 1"), HasSubstr(there.path())));
}

TEST(SnapshotDirectoryTest, WhoHasNoneWhereOthersHaveOneIsNotTakenIntoTheGroup) {
  const ScratchDirectory here;
  EXPECT_THAT(WhyNotTaken({"--snapshot_dir=" + here.path()}, {}),
              HasSubstr("node 1 has no --snapshot_dir"));
  EXPECT_THAT(WhyNotTaken({}, {"--snapshot_dir=" + here.path()}),
              HasSubstr("node 1 has a --snapshot_dir, and node 0 has none"));
}

TEST(SnapshotDirectoryTest, ProofsLeaveNothingBehind) {
  const ScratchDirectory here;
  auto group = StartGroup(2, "cpu:1", {"--snapshot_dir=" + here.path()});
  ASSERT_TRUE(group.ok()) << group.status();
  EXPECT_TRUE(std::filesystem::is_empty(here.path()));
}

}  // namespace
}  // namespace dmuond::testing
