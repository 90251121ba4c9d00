// Whatever happens to the storage while a snapshot is written: afterwards the old one restores or
// the new one, each whole.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/server/storage/fault_storage.h"
#include "tests/server/storage/snapshots.h"

namespace dmuond::server::storage::testing {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kOld = 100;
constexpr int64_t kNew = 200;
constexpr int64_t kNext = 300;

// A new snapshot beside an old one, and what a coordinator does after it. `committed`: the new one
// was reported durable.
absl::Status SaveNew(FaultStorage& storage, const Job& job, bool& committed) {
  committed = false;
  if (absl::Status status = Save(storage, job, kNew); !status.ok()) return status;
  committed = true;
  absl::StatusOr<SnapshotStore> store = SnapshotStore::Create(storage, kJob);
  absl::Status status = store->Retain(1);
  if (status.ok()) status = store->RemoveLeftovers(IdAt(kNext).attempt);
  return status;
}

std::optional<int64_t> NewestStep(FaultStorage& storage, const Job& job) {
  SnapshotStore store = SnapshotStore::Create(storage, kJob).value();
  std::vector<SnapshotEntry> broken;
  const absl::StatusOr<std::optional<SnapshotEntry>> newest = store.Newest(&broken);
  EXPECT_TRUE(newest.ok()) << newest.status();
  for (const SnapshotEntry& entry : broken) ADD_FAILURE() << entry.problem;
  if (!newest.ok() || !newest->has_value()) return std::nullopt;
  const absl::Status restored = RestoreAndCompare(storage, (*newest)->manifest, job);
  EXPECT_TRUE(restored.ok()) << restored;
  return (*newest)->id.step.value();
}

// The job goes on after the fault: saving works again and leaves one snapshot, nothing else.
void ExpectGoesOn(FaultStorage& storage, const Job& job) {
  storage.NeverFail();
  storage.LimitBytes(-1);
  ASSERT_TRUE(Save(storage, job, kNext).ok());
  SnapshotStore store = SnapshotStore::Create(storage, kJob).value();
  ASSERT_TRUE(store.Retain(1).ok());
  ASSERT_TRUE(store.RemoveLeftovers(IdAt(kNext + 1).attempt).ok());
  EXPECT_EQ(NewestStep(storage, job), kNext);
  EXPECT_EQ(storage.List(kJob).value(), std::vector<std::string>{DirectoryName(IdAt(kNext))});
}

int64_t CountOperations(const Job& job) {
  FaultStorage storage(0);
  bool committed = false;
  EXPECT_TRUE(Save(storage, job, kOld).ok());
  storage.NeverFail();
  EXPECT_TRUE(SaveNew(storage, job, committed).ok());
  return storage.operations();
}

void TryFault(const Job& job, int64_t operation, Fault fault, uint64_t seed, bool restart) {
  SCOPED_TRACE(absl::StrCat("operation ", operation, ", fault ", static_cast<int>(fault), ", seed ",
                            seed, restart ? ", restarted" : ""));
  FaultStorage storage(seed);
  ASSERT_TRUE(Save(storage, job, kOld).ok());
  storage.Restart();

  bool committed = false;
  storage.FailAt(operation, fault);
  const absl::Status saved = SaveNew(storage, job, committed);
  EXPECT_FALSE(saved.ok() && storage.crashed());
  storage.NeverFail();
  if (storage.crashed() || restart) storage.Restart();
  const std::optional<int64_t> newest = NewestStep(storage, job);
  ASSERT_TRUE(newest.has_value());
  if (committed) {
    EXPECT_EQ(*newest, kNew);
  } else {
    EXPECT_TRUE(*newest == kOld || *newest == kNew) << *newest;
  }
  ExpectGoesOn(storage, job);
}

TEST(SnapshotFaultsTest, OldOrNewRestoresWhicheverOperationFails) {
  const Job job = MakeJob(2, 2, 1);
  const int64_t operations = CountOperations(job);
  ASSERT_GT(operations, 100);
  for (int64_t operation = 0; operation < operations; ++operation) {
    for (uint64_t seed = 0; seed < 2; ++seed) {
      TryFault(job, operation, Fault::kCrash, seed, true);
      TryFault(job, operation, Fault::kCrashAfter, seed, true);
    }
    TryFault(job, operation, Fault::kError, 7, false);
    TryFault(job, operation, Fault::kError, 8, true);
    if (HasFatalFailure()) return;
  }
}

TEST(SnapshotFaultsTest, WhatIsDurableSurvivesAnyCrash) {
  const Job job = MakeJob(2, 2, 1);
  for (uint64_t seed = 0; seed < 100; ++seed) {
    FaultStorage storage(seed);
    ASSERT_TRUE(Save(storage, job, kOld).ok());
    storage.Restart();
    ASSERT_EQ(NewestStep(storage, job), kOld) << "seed " << seed;
  }
}

TEST(SnapshotFaultsTest, OldOneRestoresWhenTheDiskIsFullAtAnyByte) {
  const Job job = MakeJob(2, 2, 1);
  bool full = true;
  for (int64_t room = 0; full; room += 1 + room / 7) {
    SCOPED_TRACE(absl::StrCat("room for ", room, " bytes"));
    FaultStorage storage(1);
    ASSERT_TRUE(Save(storage, job, kOld).ok());
    storage.LimitBytes(room);
    bool committed = false;
    const absl::Status saved = SaveNew(storage, job, committed);
    full = !committed;
    if (full) {
      EXPECT_EQ(saved.code(), absl::StatusCode::kResourceExhausted) << saved;
      // What a failed snapshot took is given back, as far as it can be: the job's other files, and
      // the next snapshot, need the room.
      const auto left = storage.List(absl::StrCat(kJob, "/", DirectoryName(IdAt(kNew))));
      ASSERT_TRUE(left.ok());
      EXPECT_THAT(*left, Not(Contains(HasSubstr(".safetensors.tmp"))));
    }
    EXPECT_EQ(NewestStep(storage, job), full ? kOld : kNew);
    ExpectGoesOn(storage, job);
  }
}

TEST(SnapshotFaultsTest, ReadErrorsAndFlippedBitsOfReadsAreErrorsOrHarmless) {
  const Job job = MakeJob(2, 2, 1);
  FaultStorage storage(3);
  ASSERT_TRUE(Save(storage, job, kOld).ok());
  SnapshotStore store = SnapshotStore::Create(storage, kJob).value();
  storage.NeverFail();
  const v1::SnapshotManifest manifest = store.Newest()->value().manifest;
  ASSERT_TRUE(RestoreAndCompare(storage, manifest, job).ok());
  const int64_t operations = storage.operations();
  for (int64_t operation = 0; operation < operations; ++operation) {
    for (const Fault fault : {Fault::kError, Fault::kFlip}) {
      SCOPED_TRACE(absl::StrCat("operation ", operation, ", fault ", static_cast<int>(fault)));
      storage.FailAt(operation, fault);
      const auto entries = store.List();
      if (!entries.ok()) continue;
      const SnapshotEntry& entry = entries->front();
      if (entry.state == SnapshotState::kBroken) continue;
      // kInternal is what RestoreAndCompare says of wrong values.
      const absl::Status restored = RestoreAndCompare(storage, entry.manifest, job);
      EXPECT_NE(restored.code(), absl::StatusCode::kInternal) << restored;
    }
  }
}

TEST(SnapshotFaultsTest, EveryFlippedBitOnDiskIsFoundAndNamed) {
  const Job job = MakeJob(1, 1, 1);
  FaultStorage storage(4);
  ASSERT_TRUE(Save(storage, job, kOld).ok());
  SnapshotStore store = SnapshotStore::Create(storage, kJob).value();
  const std::string directory = store.PathOf(IdAt(kOld));
  const std::vector<std::string> names = storage.List(directory).value();
  for (const std::string& name : names) {
    const std::string path = absl::StrCat(directory, "/", name);
    const auto bits = static_cast<int64_t>(storage.Contents(path).size()) * 8;
    for (int64_t bit = 0; bit < bits; bit += 1 + bit % 61) {
      SCOPED_TRACE(absl::StrCat(path, " bit ", bit));
      storage.FlipBit(path, bit);
      SnapshotEntry entry = store.List()->front();
      absl::Status status = entry.problem;
      if (status.ok()) status = RestoreAndCompare(storage, entry.manifest, job);
      ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
      ASSERT_THAT(std::string(status.message()), HasSubstr(name));
      storage.FlipBit(path, bit);
    }
  }
}

TEST(SnapshotFaultsTest, TruncatedFilesAreFoundAndNamed) {
  const Job job = MakeJob(1, 1, 1);
  FaultStorage storage(5);
  ASSERT_TRUE(Save(storage, job, kOld).ok());
  ASSERT_TRUE(Save(storage, job, kNew).ok());
  SnapshotStore store = SnapshotStore::Create(storage, kJob).value();
  const std::string path = store.PathOf(IdAt(kNew)) + "/lane-00000.safetensors";
  storage.Truncate(path, static_cast<int64_t>(storage.Contents(path).size()) - 1);
  std::vector<SnapshotEntry> broken;
  const auto newest = store.Newest(&broken);
  ASSERT_TRUE(newest.ok() && newest->has_value());
  EXPECT_EQ((*newest)->id, IdAt(kOld));
  ASSERT_EQ(broken.size(), 1);
  EXPECT_EQ(broken[0].problem.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(broken[0].problem.message()), HasSubstr(path));
  EXPECT_EQ(store.Find(scheduler::StepId(kNew)).status(), broken[0].problem);
}

}  // namespace
}  // namespace dmuond::server::storage::testing
