// Jobs that go on from a snapshot after everything was killed: on other numbers of lanes, daemons
// and trainers, bit for bit; and what is refused.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/cost_file.h"
#include "tests/client/daemon_group.h"
#include "tests/client/daemon_process.h"
#include "tests/server/system/daemon_status.h"
#include "tests/server/system/snapshot_fixture.h"
#include "tests/server/system/snapshot_world.h"

namespace dmuond::testing {
namespace {

namespace fs = std::filesystem;
using client::Resume;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct Shape {
  int32_t ranks = 2;
  int32_t daemons = 1;
  int32_t lanes = 1;
};

class RestoreTest : public SnapshotFixture<9> {
 protected:
  void StartDaemons(const Shape& shape, const std::vector<std::string>& more = {}) {
    std::vector<std::string> flags = {"--threads=1", "--snapshot_dir=" + scratch_.path(),
                                      "--snapshot_every_steps=3", "--register_timeout=20s"};
    flags.insert(flags.end(), more.begin(), more.end());
    const std::string devices = absl::StrCat("cpu:", shape.lanes);
    if (shape.daemons > 1) {
      auto group = StartGroup(shape.daemons, devices, flags);
      ASSERT_TRUE(group.ok()) << group.status();
      group_ = *std::move(group);
    } else {
      auto daemon = DaemonProcess::Start({.devices = devices, .flags = flags});
      ASSERT_TRUE(daemon.ok()) << daemon.status();
      group_.push_back(*std::move(daemon));
    }
  }
  void KillDaemons() {
    for (const auto& daemon : group_) daemon->Kill();
    group_.clear();
  }
  // A life of the job, killed after `last` with a durable step `durable`.
  void LiveUntil(const Shape& shape, Resume resume, int64_t last, int64_t durable) {
    StartDaemons(shape);
    auto world = MakeWorld({.ranks = shape.ranks, .resume = resume});
    const absl::Status started = world->Start();
    ASSERT_TRUE(started.ok()) << started;
    for (int64_t step = (*world)[0].last_committed_step() + 1; step <= last; ++step) {
      ASSERT_TRUE(world->StepUntil(step));
      EXPECT_EQ(world->Weights(), undisturbed_[step]) << "step " << step;
      if (step <= durable && step % 3 == 0) {
        ASSERT_TRUE(WaitDurable(step));
      }
    }
    KillDaemons();
  }
  void ExpectGoesOn(const Shape& shape, int64_t from) {
    StartDaemons(shape);
    auto world = MakeWorld({.ranks = shape.ranks, .resume = Resume::kRequire});
    const absl::Status started = world->Start();
    ASSERT_TRUE(started.ok()) << started;
    for (int32_t rank = 0; rank < shape.ranks; ++rank) {
      client::Session& session = (*world)[rank];
      EXPECT_TRUE(session.has_state());
      EXPECT_EQ(session.last_committed_step(), from);
      EXPECT_EQ(session.durable_step(), from);
      EXPECT_EQ(session.trainer_state(), SnapshotWorld::StateOf(rank, from));
    }
    EXPECT_EQ(world->Weights(), undisturbed_[from]);
    for (int64_t step = from + 1; step <= kSteps; ++step) {
      ASSERT_TRUE(world->StepUntil(step));
      EXPECT_EQ(world->Weights(), undisturbed_[step]) << "step " << step;
    }
    world->Close();
  }
};

TEST_F(RestoreTest, EverythingIsKilledAndStartedAnew) {
  LiveUntil({}, Resume::kNever, 4, 3);
  ExpectGoesOn({}, 3);
}

TEST_F(RestoreTest, OnMoreLanesAndFewerTrainers) {
  LiveUntil({.ranks = 2}, Resume::kNever, 5, 3);
  ExpectGoesOn({.ranks = 1, .lanes = 3}, 3);
}

TEST_F(RestoreTest, OnTwoDaemonsAfterOne) {
  LiveUntil({.ranks = 2}, Resume::kNever, 3, 3);
  ExpectGoesOn({.ranks = 2, .daemons = 2}, 3);
}

TEST_F(RestoreTest, OnOneDaemonAfterTwoWithTwoLanesEach) {
  LiveUntil({.ranks = 2, .daemons = 2, .lanes = 2}, Resume::kNever, 4, 3);
  ExpectGoesOn({.ranks = 2}, 3);
}

TEST_F(RestoreTest, SeveralLivesOnSeveralShapes) {
  LiveUntil({.ranks = 2}, Resume::kNever, 4, 3);
  LiveUntil({.ranks = 2, .daemons = 2}, Resume::kRequire, 7, 6);
  ExpectGoesOn({.ranks = 2, .lanes = 2}, 6);
}

TEST_F(RestoreTest, ATrainerThatDiesRightAfterTheRestartIsReplacedWithoutADisk) {
  LiveUntil({.ranks = 2, .daemons = 2}, Resume::kNever, 4, 3);
  StartDaemons({.ranks = 2, .daemons = 2});
  auto world = MakeWorld({.ranks = 2, .resume = Resume::kRequire});
  ASSERT_TRUE(world->Start().ok());
  ASSERT_TRUE(world->Replace(1).ok());
  ASSERT_TRUE(world->StepUntil(5));
  EXPECT_EQ(world->Weights(), undisturbed_[5]);
}

TEST_F(RestoreTest, WhoAttachesAfterTheJobHasGoneBackLearnsWhereItStands) {
  StartDaemons({.ranks = 2});
  auto world = MakeWorld({.ranks = 2, .resume = Resume::kIfPresent});
  ASSERT_TRUE(world->Start().ok());
  ASSERT_TRUE(world->StepUntil(5));
  ASSERT_TRUE(WaitDurable(3));
  world->Drop(1);
  ASSERT_TRUE(world->Register(1).ok());
  EXPECT_EQ((*world)[1].last_committed_step(), 5);
  ASSERT_EQ((*world)[0].LoadSnapshot(3).value_or(-1), 3);
  // The job begins again when the one has acknowledged, and the other attached.
  std::thread goes_back([&] {
    const auto outcome = (*world)[0].Step({.groups = {{.learning_rate = 0.02}}});
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->kind, client::Outcome::Kind::kRolledBack);
  });
  const absl::Status attached = (*world)[1].Attach();
  goes_back.join();
  ASSERT_TRUE(attached.ok()) << attached;
  EXPECT_EQ((*world)[1].last_committed_step(), 3);
  EXPECT_EQ((*world)[1].trainer_state(), SnapshotWorld::StateOf(1, 3));
  EXPECT_EQ(world->Weights(), undisturbed_[3]);
  ASSERT_TRUE(world->StepUntil(kSteps));
  EXPECT_EQ(world->Weights(), undisturbed_[kSteps]);
}

TEST_F(RestoreTest, TheSamePlanComesOutWhateverIsMeasuredMeanwhile) {
  const Shape shape{.ranks = 2, .daemons = 1, .lanes = 3};
  const scheduler::Iteration standard{.steps = 5, .rounds = 5};
  const auto table = [&](const std::string& name, double microseconds) {
    const scheduler::CostTable costs{.device = name,
                                     .entries = {{{24, 16, standard}, 1, microseconds},
                                                 {{12, 8, standard}, 1, 5},
                                                 {{12, 8, standard}, 3, 12}},
                                     .choices = {}};
    const std::string path = absl::StrCat(scratch_.path(), "/", name, microseconds);
    EXPECT_TRUE(server::WriteCostTable(costs, path).ok());
    return "--cost_table=" + path;
  };
  const std::string first = table("here", 1000);
  const std::string second = table("here", 10);
  const std::string elsewhere = table("elsewhere", 10);
  // The digest of the plan in the job's next life.
  const auto next_life = [&](const std::vector<std::string>& flags, Resume resume) -> uint64_t {
    StartDaemons(shape, flags);
    auto world = MakeWorld({.ranks = shape.ranks, .resume = resume});
    const absl::Status started = world->Start();
    EXPECT_TRUE(started.ok()) << started;
    if (!started.ok()) return 0;
    EXPECT_TRUE((*world)[0].last_committed_step() > 0 || world->StepUntil(3));
    EXPECT_TRUE(WaitDurable(3));
    KillDaemons();
    return world->plan_digest();
  };
  const uint64_t planned = next_life({first}, Resume::kNever);
  EXPECT_EQ(next_life({}, Resume::kRequire), planned) << "without a table";
  EXPECT_EQ(next_life({second}, Resume::kRequire), planned) << "another table of this device";
  const uint64_t anew = next_life({second, "--replan"}, Resume::kRequire);
  EXPECT_NE(anew, planned) << "what was measured now";
  EXPECT_EQ(next_life({second}, Resume::kRequire), planned) << "no snapshot was made since";
  EXPECT_NE(next_life({elsewhere}, Resume::kRequire), planned) << "a table of another device";
  StartDaemons({.ranks = 2, .daemons = 2, .lanes = 2}, {first});
  auto world = MakeWorld({.ranks = 2, .resume = Resume::kRequire});
  ASSERT_TRUE(world->Start().ok());
  EXPECT_NE(world->plan_digest(), planned) << "another group";
  ASSERT_TRUE(world->StepUntil(5));
  EXPECT_EQ(world->Weights(), undisturbed_[5]);
}

TEST_F(RestoreTest, WhoDoesNotWantTheStateIsToldBothWaysOut) {
  LiveUntil({}, Resume::kNever, 3, 3);
  StartDaemons({});
  auto world = MakeWorld({});
  const absl::Status refused = world->Start();
  EXPECT_EQ(client::ReasonOf(refused), "JOB_HAS_STATE") << refused;
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("step 3"), HasSubstr("if_present"), HasSubstr("another job name")));
  auto other = MakeWorld({.job = "other", .resume = Resume::kIfPresent});
  EXPECT_TRUE(other->Start().ok()) << "another name has no state";
}

TEST_F(RestoreTest, WhoNeedsAStateThatIsNotThereIsTold) {
  StartDaemons({});
  auto world = MakeWorld({.resume = Resume::kRequire});
  EXPECT_EQ(client::ReasonOf(world->Start()), "JOB_HAS_NO_STATE");
}

TEST_F(RestoreTest, AnotherLayoutIsRefusedByTheParametersName) {
  LiveUntil({}, Resume::kNever, 3, 3);
  StartDaemons({});
  auto world = MakeWorld({.resume = Resume::kRequire, .matrix = {24, 17}});
  const absl::Status refused = world->Start();
  EXPECT_EQ(client::ReasonOf(refused), "LAYOUT_DIFFERS") << refused;
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("wide"), HasSubstr("24x16"), HasSubstr("24x17")));
}

TEST_F(RestoreTest, ATruncatedSnapshotIsPassedOverForTheOlderOneWithAWarning) {
  LiveUntil({}, Resume::kNever, 6, 6);
  const std::string file = FileOf(scratch_.path(), 6, "lane-00000.safetensors");
  fs::resize_file(file, fs::file_size(file) - 1);
  ExpectGoesOn({}, 3);
  EXPECT_THAT(group_[0]->Log(), AllOf(HasSubstr("a broken snapshot is passed over"),
                                      HasSubstr("lane-00000.safetensors")));
}

TEST_F(RestoreTest, AFlippedBitIsRefusedByTheNameOfTheFileAndTheTensor) {
  LiveUntil({}, Resume::kNever, 6, 6);
  const std::string path = FileOf(scratch_.path(), 6, "lane-00000.safetensors");
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-5, std::ios::end);
    const char flipped = static_cast<char>(file.peek() ^ 1);
    file.seekp(-5, std::ios::end);
    file.put(flipped);
  }
  StartDaemons({});
  auto world = MakeWorld({.resume = Resume::kRequire});
  const absl::Status refused = world->Start();
  EXPECT_EQ(client::ReasonOf(refused), "SNAPSHOT_BROKEN") << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("lane-00000.safetensors"));
  // As docs/snapshots.md says.
  KillDaemons();
  const std::string manifest = FileOf(scratch_.path(), 6, "manifest.json");
  fs::rename(manifest, FileOf(scratch_.path(), 6, "manifest.set-aside.json"));
  ExpectGoesOn({}, 3);
}

}  // namespace
}  // namespace dmuond::testing
