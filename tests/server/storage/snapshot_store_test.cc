#include "server/storage/snapshot_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/storage/manifest.h"
#include "server/storage/shared_directory.h"
#include "tests/server/storage/fault_storage.h"
#include "tests/server/storage/snapshots.h"

namespace dmuond::server::storage {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::FaultStorage;
using ::testing::HasSubstr;
using testing::IdAt;
using ::testing::IsEmpty;
using testing::Job;
using testing::kJob;
using testing::MakeJob;
using testing::Save;

class SnapshotStoreTest : public ::testing::Test {
 protected:
  void SaveAll(const std::vector<int64_t>& steps) {
    for (int64_t step : steps) ASSERT_TRUE(Save(storage_, job_, step).ok());
  }
  std::vector<std::string> Listed() {
    std::vector<std::string> out;
    const std::vector<SnapshotEntry> entries = store_.List().value();
    for (const SnapshotEntry& entry : entries) {
      out.push_back(absl::StrCat(entry.id.step.value(), " ", Name(entry.state)));
    }
    return out;
  }
  std::string Path(int64_t step, const std::string& name) {
    return absl::StrCat(store_.PathOf(IdAt(step)), "/", name);
  }

  Job job_ = MakeJob(2, 1, 2);
  FaultStorage storage_{1};
  SnapshotStore store_ = SnapshotStore::Create(storage_, kJob).value();
};

TEST_F(SnapshotStoreTest, AJobWithoutADirectoryHasNoSnapshots) {
  EXPECT_THAT(Listed(), IsEmpty());
  EXPECT_EQ(store_.Newest().value(), std::nullopt);
  EXPECT_EQ(store_.Largest().value(), std::nullopt);
  EXPECT_TRUE(store_.Retain(1).ok());
  EXPECT_TRUE(store_.RemoveLeftovers(IdAt(9).attempt).ok());
  EXPECT_TRUE(absl::IsNotFound(store_.Find(scheduler::StepId(3)).status()));
}

TEST_F(SnapshotStoreTest, ASnapshotExistsWhenItsManifestDoes) {
  SaveAll({5, 6});
  ASSERT_TRUE(store_.Prepare(IdAt(7)).ok());
  EXPECT_THAT(Listed(), ElementsAre("7 unfinished", "6 durable", "5 durable"));
  EXPECT_EQ(store_.Newest()->value().id, IdAt(6));
  EXPECT_EQ(store_.Find(scheduler::StepId(5))->id, IdAt(5));
  EXPECT_THAT(std::string(store_.Find(scheduler::StepId(7)).status().message()),
              HasSubstr("it has steps 6, 5"));
}

TEST_F(SnapshotStoreTest, NewerAttemptsCountEvenWithSmallerSteps) {
  SaveAll({5, 6});
  // Epoch 3 went on from step 4 and has come to 5 again.
  const SnapshotId again{scheduler::MakeAttempt(scheduler::GroupEpoch(3), 1), scheduler::StepId(5)};
  ASSERT_TRUE(store_.Prepare(again).ok());
  EXPECT_EQ(store_.Largest().value(), again) << "unfinished ones count too";
  v1::SnapshotManifest manifest = store_.Newest()->value().manifest;
  manifest.set_step(5);
  manifest.set_attempt(again.attempt.value());
  for (const v1::SnapshotFile& file : manifest.files()) {
    const std::string to = absl::StrCat(store_.PathOf(again), "/", file.name());
    ASSERT_TRUE(storage_.Create(to).ok());
    storage_.SetContents(to, storage_.Contents(Path(6, file.name())));
  }
  ASSERT_TRUE(store_.Commit(manifest).ok());
  EXPECT_EQ(store_.Newest()->value().id, again);
  EXPECT_EQ(store_.Find(scheduler::StepId(5))->id, again);
  EXPECT_EQ(store_.Find(IdAt(5))->id, IdAt(5)) << "the older one of that step";
  ASSERT_TRUE(store_.SetAsideAfter(IdAt(5)).ok());
  EXPECT_EQ(store_.Find(scheduler::StepId(5))->id, IdAt(5));
  EXPECT_TRUE(absl::IsNotFound(store_.Find(again).status())) << "it counts no more";
}

TEST_F(SnapshotStoreTest, RetentionKeepsTheNewestAndWhatIsBroken) {
  SaveAll({1, 2, 3, 4, 5});
  storage_.FlipBit(Path(2, kManifestName), 5000);
  ASSERT_TRUE(store_.Prepare(IdAt(6)).ok());
  ASSERT_TRUE(store_.Retain(2).ok());
  EXPECT_THAT(Listed(), ElementsAre("6 unfinished", "5 durable", "4 durable", "2 broken"));
}

TEST_F(SnapshotStoreTest, RetentionNeverCountsABrokenOne) {
  SaveAll({1, 2, 3});
  storage_.Truncate(Path(3, "lane-00000.safetensors"), 100);
  ASSERT_TRUE(store_.Retain(2).ok());
  EXPECT_THAT(Listed(), ElementsAre("3 broken", "2 durable", "1 durable"));
}

TEST_F(SnapshotStoreTest, LeftoversGoExceptTheSnapshotBeingWritten) {
  SaveAll({1});
  ASSERT_TRUE(store_.Prepare(IdAt(2)).ok());
  ASSERT_TRUE(storage_.Create(Path(2, "lane-00000.safetensors.tmp")).ok());
  ASSERT_TRUE(store_.Prepare(IdAt(3)).ok());
  ASSERT_TRUE(store_.RemoveLeftovers(IdAt(3).attempt).ok());
  EXPECT_THAT(Listed(), ElementsAre("3 unfinished", "1 durable"));
}

TEST_F(SnapshotStoreTest, WhatIsSetAsideCountsNoMoreAndGoesWhenNewerOnesAreThere) {
  SaveAll({1, 2, 3});
  ASSERT_TRUE(store_.SetAsideAfter(IdAt(1)).ok());
  EXPECT_THAT(Listed(), ElementsAre("3 set aside", "2 set aside", "1 durable"));
  EXPECT_EQ(store_.Newest()->value().id, IdAt(1));
  storage_.Restart();
  EXPECT_EQ(store_.Newest()->value().id, IdAt(1)) << "set aside durably";
  ASSERT_TRUE(store_.RemoveLeftovers(IdAt(9).attempt).ok());
  ASSERT_TRUE(store_.Retain(1).ok());
  EXPECT_THAT(Listed(), ElementsAre("3 set aside", "2 set aside", "1 durable"));
  SaveAll({4});
  ASSERT_TRUE(store_.Retain(1).ok());
  EXPECT_THAT(Listed(), ElementsAre("4 durable"));
}

TEST_F(SnapshotStoreTest, WhatIsDiscardedCountsNoMoreAndStays) {
  SaveAll({7, 8});
  ASSERT_TRUE(store_.DiscardAll().ok());
  EXPECT_FALSE(store_.Newest()->has_value());
  storage_.Restart();
  EXPECT_FALSE(store_.Newest()->has_value()) << "discarded durably";
  SaveAll({9, 10, 11});
  ASSERT_TRUE(store_.RemoveLeftovers(IdAt(12).attempt).ok());
  ASSERT_TRUE(store_.SetAsideAfter(IdAt(10)).ok());
  ASSERT_TRUE(store_.Retain(1).ok());
  EXPECT_THAT(Listed(), ElementsAre("11 set aside", "10 durable", "8 discarded", "7 discarded"));
}

TEST_F(SnapshotStoreTest, OwnersAreThoseOfAllThatCountAndEarlierBuildsNamedNone) {
  SaveAll({1, 2, 3});
  EXPECT_THAT(store_.Owners()->uids, IsEmpty());
  for (const auto& [step, owner] : {std::pair(1, 1000U), std::pair(2, 1001U)}) {
    v1::SnapshotManifest manifest = store_.Find(scheduler::StepId(step))->manifest;
    manifest.set_owner_uid(owner);
    ASSERT_TRUE(store_.Commit(manifest).ok());
  }
  EXPECT_THAT(store_.Owners()->uids, ElementsAre(1001U, 1000U)) << "the newest first";
  ASSERT_TRUE(storage_.Remove(Path(2, "lane-00000.safetensors")).ok());
  EXPECT_THAT(store_.Owners()->uids, ElementsAre(1001U, 1000U)) << "a broken one is still his";
  EXPECT_TRUE(store_.Owners()->unread.ok());
  ASSERT_TRUE(storage_.Remove(Path(2, "manifest.json")).ok());
  ASSERT_TRUE(storage_.Create(Path(2, "manifest.json")).ok());
  EXPECT_THAT(std::string(store_.Owners()->unread.message()), HasSubstr("manifest.json"));
  ASSERT_TRUE(store_.DiscardAll().ok());
  EXPECT_THAT(store_.Owners()->uids, IsEmpty());
  EXPECT_TRUE(store_.Owners()->unread.ok());
}

// Something happens between two of the store's operations, as by another daemon.
class BusyStorage : public FaultStorage {
 public:
  using FaultStorage::FaultStorage;
  std::function<void()> before_open, before_sync;

  absl::StatusOr<std::unique_ptr<ReadableFile>> Open(const std::string& path) override {
    if (before_open) std::exchange(before_open, nullptr)();
    return FaultStorage::Open(path);
  }
  absl::Status SyncDirectory(const std::string& path) override {
    if (before_sync) std::exchange(before_sync, nullptr)();
    return FaultStorage::SyncDirectory(path);
  }
};

TEST(BusySnapshotStoreTest, AManifestThatIsRenamedOrRemovedMeanwhileIsNotBroken) {
  BusyStorage storage(1);
  SnapshotStore store = SnapshotStore::Create(storage, kJob).value();
  ASSERT_TRUE(Save(storage, MakeJob(2, 1, 2), 1).ok());
  ASSERT_TRUE(Save(storage, MakeJob(2, 1, 2), 2).ok());
  const auto path = [&](int64_t step, const char* name) {
    return absl::StrCat(store.PathOf(IdAt(step)), "/", name);
  };
  storage.before_open = [&] {
    EXPECT_TRUE(storage.Rename(path(2, "manifest.json"), path(2, "manifest.discarded.json")).ok());
  };
  const std::vector<SnapshotEntry> entries = store.List().value();
  ASSERT_EQ(entries.size(), 2U);
  EXPECT_EQ(Name(entries[0].state), std::string("discarded")) << entries[0].problem;
  EXPECT_FALSE(entries[0].unread());
  storage.before_open = [&] { EXPECT_TRUE(storage.Remove(path(1, "manifest.json")).ok()); };
  EXPECT_TRUE(store.Owners()->unread.ok()) << store.Owners()->unread;
}

TEST(BusySnapshotStoreTest, WhatSomebodyElseHasRemovedMeanwhileIsRemoved) {
  BusyStorage storage(1);
  SnapshotStore store = SnapshotStore::Create(storage, kJob).value();
  ASSERT_TRUE(Save(storage, MakeJob(2, 1, 2), 1).ok());
  storage.before_sync = [&] {
    const std::string directory = store.PathOf(IdAt(1));
    const std::vector<std::string> names = storage.List(directory).value();
    for (const std::string& name : names) {
      EXPECT_TRUE(storage.Remove(absl::StrCat(directory, "/", name)).ok());
    }
    EXPECT_TRUE(storage.RemoveDirectory(directory).ok());
  };
  int asked = 0;
  const absl::Status removed = store.RemoveUpTo(IdAt(1), [&] { return ++asked < 2; });
  EXPECT_TRUE(removed.ok()) << removed;
  EXPECT_TRUE(storage.List(kJob).ok()) << "somebody has come: the job's directory stays";
  EXPECT_TRUE(store.RemoveUpTo(IdAt(1), [] { return true; }).ok());
  EXPECT_TRUE(absl::IsNotFound(storage.List(kJob).status()));
}

TEST_F(SnapshotStoreTest, AGroupIsNamedByManifestsThatDoNotCountToo) {
  SaveAll({1, 2, 3});
  for (const int64_t step : {1, 2}) {
    v1::SnapshotManifest manifest = store_.Find(scheduler::StepId(step))->manifest;
    manifest.set_group(absl::StrCat("group", step));
    ASSERT_TRUE(store_.Commit(manifest).ok());
  }
  ASSERT_TRUE(store_.Prepare(IdAt(4)).ok());
  const auto groups = [&] {
    std::vector<std::string> out;
    const std::vector<SnapshotEntry> entries = store_.List().value();
    for (const SnapshotEntry& entry : entries) out.push_back(store_.GroupOf(entry));
    return out;
  };
  EXPECT_THAT(groups(), ElementsAre("", "", "group2", "group1"));
  ASSERT_TRUE(store_.SetAsideAfter(IdAt(1)).ok());
  EXPECT_THAT(groups(), ElementsAre("", "", "group2", "group1"));
  ASSERT_TRUE(store_.DiscardAll().ok());
  EXPECT_THAT(groups(), ElementsAre("", "", "group2", "group1"));
}

TEST_F(SnapshotStoreTest, AllGoButWhatIsBrokenUntilSomebodyComes) {
  SaveAll({1, 2, 3, 4});
  ASSERT_TRUE(store_.SetAsideAfter(IdAt(3)).ok());
  ASSERT_TRUE(store_.Prepare(IdAt(5)).ok());
  ASSERT_TRUE(storage_.Remove(Path(2, "lane-00000.safetensors")).ok());
  int asked = 0;
  ASSERT_TRUE(store_.RemoveUpTo(IdAt(5), [&] { return ++asked < 2; }).ok());
  EXPECT_THAT(Listed(), ElementsAre("5 unfinished", "4 set aside", "3 durable", "2 broken"))
      << "somebody came meanwhile";
  const auto go_on = [] { return true; };
  ASSERT_TRUE(store_.RemoveUpTo(IdAt(4), go_on).ok());
  EXPECT_THAT(Listed(), ElementsAre("5 unfinished", "2 broken"));
  ASSERT_TRUE(store_.RemoveUpTo(IdAt(5), go_on).ok());
  EXPECT_THAT(Listed(), ElementsAre("2 broken"));
  ASSERT_TRUE(storage_.Remove(Path(2, "manifest.json")).ok());
  ASSERT_TRUE(store_.RemoveUpTo(IdAt(5), go_on).ok());
  EXPECT_TRUE(absl::IsNotFound(storage_.List(kJob).status())) << "the job's directory goes, too";
  EXPECT_TRUE(store_.RemoveUpTo(IdAt(5), go_on).ok());
}

TEST_F(SnapshotStoreTest, CommitLooksForEveryFile) {
  SaveAll({1});
  v1::SnapshotManifest manifest = store_.Newest()->value().manifest;
  manifest.set_step(2);
  manifest.set_attempt(IdAt(2).attempt.value());
  ASSERT_TRUE(store_.Prepare(IdAt(2)).ok());
  const absl::Status status = store_.Commit(manifest);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("lane-00000.safetensors"));
  EXPECT_EQ(store_.Newest()->value().id, IdAt(1));
  manifest.set_job("other");
  EXPECT_EQ(store_.Commit(manifest).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(SnapshotStoreTest, AManifestInAnotherDirectoryIsNotThatSnapshot) {
  SaveAll({1});
  ASSERT_TRUE(storage_.Rename(store_.PathOf(IdAt(1)), store_.PathOf(IdAt(9))).ok());
  const std::vector<SnapshotEntry> entries = store_.List().value();
  ASSERT_EQ(entries[0].state, SnapshotState::kBroken);
  EXPECT_THAT(std::string(entries[0].problem.message()),
              AllOf(HasSubstr("step-000000000009.1.9"), HasSubstr("is of job run7, step 1")));
}

TEST_F(SnapshotStoreTest, JobsAreThoseWithSnapshots) {
  SaveAll({1});
  ASSERT_TRUE(storage_.MakeDirectory("lost+found").ok());
  ASSERT_TRUE(storage_.MakeDirectory("other").ok());
  ASSERT_TRUE(storage_.Create("file").ok());
  EXPECT_THAT(JobsIn(storage_).value(), ElementsAre(kJob));
  EXPECT_FALSE(SnapshotStore::Create(storage_, "../x").ok());
}

// ---- the proof that a directory is shared ----

TEST(SharedDirectoryTest, HoldsWhereAllSeeOneDirectory) {
  FaultStorage storage(1);
  const DirectoryProof proof = BeginProof(storage, 0x12, 0x34).value();
  const scheduler::NodeRank node(2);
  ASSERT_TRUE(AnswerProof(storage, proof.name, node, "/of0").ok());
  EXPECT_TRUE(AnswerProof(storage, proof.name, node, "/of0").ok()) << "a second join";
  EXPECT_TRUE(CheckAnswer(storage, proof, node).ok());
  EndProof(storage, proof, node);
  EXPECT_THAT(storage.List("").value(), IsEmpty());
}

TEST(SharedDirectoryTest, NamesTheNodesThatHaveAnother) {
  FaultStorage storage(1);
  FaultStorage elsewhere(2);
  const DirectoryProof proof = BeginProof(storage, 0x12, 0x34).value();
  ASSERT_TRUE(AnswerProof(storage, proof.name, scheduler::NodeRank(0), "/of0").ok());
  const absl::Status refused = AnswerProof(elsewhere, proof.name, scheduler::NodeRank(1), "/of0");
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("node 1's snapshot directory"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("is not node 0's, /of0"));
  // A copy of the directory, made after the proof began, answers in the wrong place.
  ASSERT_TRUE(BeginProof(elsewhere, 0x12, 0x34).ok());
  ASSERT_TRUE(AnswerProof(elsewhere, proof.name, scheduler::NodeRank(2), "/of0").ok());
  EXPECT_TRUE(CheckAnswer(storage, proof, scheduler::NodeRank(0)).ok());
  for (int32_t node = 1; node < 3; ++node) {
    const absl::Status status = CheckAnswer(storage, proof, scheduler::NodeRank(node));
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("no proof from ", node)));
  }
}

TEST(SharedDirectoryTest, ASecretThatIsAnotherIsNoProof) {
  FaultStorage storage(1);
  const DirectoryProof proof = BeginProof(storage, 0x12, 0x34).value();
  ASSERT_TRUE(AnswerProof(storage, proof.name, scheduler::NodeRank(0), "/of0").ok());
  storage.SetContents(proof.name + ".0", "0000000000000035");
  EXPECT_THAT(std::string(CheckAnswer(storage, proof, scheduler::NodeRank(0)).message()),
              HasSubstr("0 (wrote something else)"));
}

TEST(SharedDirectoryTest, NamesThatAreNoProofsAreRefused) {
  FaultStorage storage(1);
  for (const char* name : {"", "../secret", ".dmuond-proof-", ".dmuond-proof-000000000000001/",
                           ".dmuond-proof-0000000000000012.0"}) {
    EXPECT_EQ(AnswerProof(storage, name, scheduler::NodeRank(0), "/of0").code(),
              absl::StatusCode::kInvalidArgument)
        << name;
  }
}

TEST(SharedDirectoryTest, OldProofsAreRemoved) {
  FaultStorage storage(1);
  ASSERT_TRUE(BeginProof(storage, 1, 2).ok());
  ASSERT_TRUE(storage.Create("kept").ok());
  ASSERT_TRUE(RemoveOldProofs(storage).ok());
  EXPECT_THAT(storage.List("").value(), ElementsAre("kept"));
}

}  // namespace
}  // namespace dmuond::server::storage
