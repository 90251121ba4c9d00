// From one world's files to another world's owners, every value compared.
#include "server/storage/restore.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "server/storage/manifest.h"
#include "server/storage/posix_storage.h"
#include "server/storage/snapshot_reader.h"
#include "tests/scheduler/property.h"
#include "tests/server/daemon/support.h"
#include "tests/server/storage/fault_storage.h"
#include "tests/server/storage/snapshots.h"

namespace dmuond::server::storage {
namespace {

using scheduler::testing::AdamW;
using ::testing::AllOf;
using testing::FaultStorage;
using ::testing::HasSubstr;
using testing::Job;
using testing::kJob;
using testing::MakeJob;
using testing::RestoreAndCompare;
using testing::Save;

v1::SnapshotManifest NewestOf(Storage& storage) {
  return SnapshotStore::Create(storage, kJob)->Newest()->value().manifest;
}

TEST(RestoreTest, OntoTheSameWorld) {
  FaultStorage storage(1);
  const Job job = MakeJob(4, 2, 2, true);
  ASSERT_TRUE(Save(storage, job, 10).ok());
  const absl::Status restored = RestoreAndCompare(storage, NewestOf(storage), job);
  EXPECT_TRUE(restored.ok()) << restored;
}

TEST(RestoreTest, EndsWhereItHasNoTarget) {
  FaultStorage storage(1);
  const Job job = MakeJob(4, 2, 2, true);
  ASSERT_TRUE(Save(storage, job, 10).ok());
  const auto reader = SnapshotReader::Open(storage, NewestOf(storage));
  ASSERT_TRUE(reader.ok()) << reader.status();
  const auto saved = (*reader)->SavedUnits(job.inputs.layout.parameters);
  ASSERT_TRUE(saved.ok()) << saved.status();
  const auto plan = scheduler::PlanRestore(job.inputs.layout, job.plan, *saved);
  ASSERT_TRUE(plan.ok()) << plan.status();
  std::vector<float> memory;
  int asked = 0;
  const absl::Status restored =
      Restore(**reader, *saved, job.plan, plan->lanes[0],
              [&](scheduler::UnitId id, StateTensor /*kind*/) -> absl::StatusOr<std::span<float>> {
                if (++asked == 2) return absl::CancelledError("not wanted any more");
                memory.resize(scheduler::Elements(job.plan.units[id.value()].box));
                return std::span<float>(memory);
              });
  EXPECT_TRUE(absl::IsCancelled(restored)) << restored;
  EXPECT_EQ(asked, 2);
}

TEST(RestoreTest, OntoLargerAndSmallerWorlds) {
  const Job one = MakeJob(1, 1, 1, true);
  const Job many = MakeJob(6, 3, 2, true);
  const Job other = MakeJob(4, 1, 4, true);
  for (const Job* from : {&one, &many, &other}) {
    FaultStorage storage(1);
    ASSERT_TRUE(Save(storage, *from, 10).ok());
    for (const Job* to : {&one, &many, &other}) {
      const absl::Status restored = RestoreAndCompare(storage, NewestOf(storage), *to);
      EXPECT_TRUE(restored.ok()) << restored;
    }
  }
}

TEST(RestoreTest, ColumnsBecomeRowsAndRowsColumns) {
  using scheduler::testing::World;
  const scheduler::Parameter tensor = AdamW("t", {12, 5, 8});
  World columns(2, 1, 2);
  columns.Hold(0, tensor, {{0, 0, 0}, {12, 5, 3}}).Hold(1, tensor, {{0, 0, 3}, {12, 5, 8}});
  World rows(3, 1, 3);
  rows.ShardRows(tensor);
  const Job from = testing::PlanFor(columns);
  const Job to = testing::PlanFor(rows);
  FaultStorage storage(1);
  ASSERT_TRUE(Save(storage, from, 10).ok());
  EXPECT_TRUE(RestoreAndCompare(storage, NewestOf(storage), to).ok());
  ASSERT_TRUE(Save(storage, to, 11).ok());
  EXPECT_TRUE(RestoreAndCompare(storage, NewestOf(storage), from).ok());
}

TEST(RestoreTest, TensorsLargerThanOneRead) {
  // Rows of 1.2 MB that no part of 1 MiB ends with.
  using scheduler::testing::World;
  const scheduler::Parameter tensor = AdamW("t", {3, 300'001});
  World whole(1, 1, 1);
  whole.Replicate(tensor);
  World columns(2, 1, 2);
  columns.Hold(0, tensor, {{0, 0}, {3, 7}}).Hold(1, tensor, {{0, 7}, {3, 300'001}});
  FaultStorage storage(1);
  ASSERT_TRUE(Save(storage, testing::PlanFor(whole), 10).ok());
  const absl::Status restored =
      RestoreAndCompare(storage, NewestOf(storage), testing::PlanFor(columns));
  EXPECT_TRUE(restored.ok()) << restored;
}

TEST(RestoreTest, RandomWorlds) {
  scheduler::testing::ForAll(25, [] {
    const auto random = [] {
      const auto nodes = static_cast<int32_t>(scheduler::testing::Pick(1, 3));
      return MakeJob(nodes * static_cast<int32_t>(scheduler::testing::Pick(1, 3)), nodes,
                     static_cast<int32_t>(scheduler::testing::Pick(1, 2)));
    };
    FaultStorage storage(1);
    RC_ASSERT(Save(storage, random(), 10).ok());
    RC_ASSERT(RestoreAndCompare(storage, NewestOf(storage), random()).ok());
  });
}

TEST(RestoreTest, ThroughARealFileSystem) {
  TempDir directory;
  const auto storage = OpenPosixStorage(directory.path());
  ASSERT_TRUE(storage.ok()) << storage.status();
  const Job job = MakeJob(4, 2, 2);
  ASSERT_TRUE(Save(**storage, job, 10).ok());
  ASSERT_TRUE(Save(**storage, job, 20).ok());
  SnapshotStore store = SnapshotStore::Create(**storage, kJob).value();
  ASSERT_TRUE(store.Retain(1).ok());
  const absl::Status restored = RestoreAndCompare(**storage, NewestOf(**storage), MakeJob(2, 1, 1));
  EXPECT_TRUE(restored.ok()) << restored;
  EXPECT_EQ(store.List()->size(), 1);
}

TEST(SnapshotReaderTest, NamesAParameterThatTheJobDoesNotHave) {
  FaultStorage storage(1);
  const Job job = MakeJob(1, 1, 1);
  ASSERT_TRUE(Save(storage, job, 10).ok());
  const auto reader = SnapshotReader::Open(storage, NewestOf(storage));
  ASSERT_TRUE(reader.ok()) << reader.status();
  std::vector<scheduler::Parameter> parameters = job.inputs.layout.parameters;
  parameters.pop_back();
  const absl::Status status = (*reader)->SavedUnits(parameters).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("\"temperature\""));
}

TEST(SnapshotReaderTest, FilesOfAnotherSnapshotAreNotTaken) {
  FaultStorage storage(1);
  const Job job = MakeJob(1, 1, 1);
  ASSERT_TRUE(Save(storage, job, 10).ok());
  ASSERT_TRUE(Save(storage, job, 20).ok());
  const auto path = [](int64_t step) {
    return std::string(kJob) + "/" + DirectoryName(testing::IdAt(step)) + "/lane-00000.safetensors";
  };
  storage.SetContents(path(20), storage.Contents(path(10)));
  const absl::Status status = SnapshotReader::Open(storage, NewestOf(storage)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(path(20)), HasSubstr("header")));
}

TEST(SnapshotReaderTest, VerifyReadsEveryByte) {
  FaultStorage storage(1);
  ASSERT_TRUE(Save(storage, MakeJob(3, 1, 2), 10).ok());
  const v1::SnapshotManifest manifest = NewestOf(storage);
  int64_t expected = 0;
  for (const v1::SnapshotFile& file : manifest.files()) {
    if (file.kind() == v1::SnapshotFile::KIND_STATE) expected += file.bytes() - file.header_bytes();
  }
  const auto verify = [&] {
    int64_t bytes = 0;
    const auto reader = SnapshotReader::Open(storage, manifest);
    if (!reader.ok()) return reader.status();
    absl::Status status = (*reader)->VerifyAll([&](int64_t n) {
      bytes += n;
      return true;
    });
    EXPECT_TRUE(!status.ok() || bytes == expected) << bytes << " of " << expected;
    return status;
  };
  EXPECT_TRUE(verify().ok());
  const std::string trainers =
      std::string(kJob) + "/" + DirectoryName(testing::IdAt(10)) + "/trainers-00000.safetensors";
  storage.FlipBit(trainers, static_cast<int64_t>(storage.Contents(trainers).size()) * 8 - 1);
  EXPECT_THAT(std::string(verify().message()),
              AllOf(HasSubstr(trainers), HasSubstr("trainer_state/2")));
}

TEST(SnapshotReaderTest, VerifyReadsNothingMoreWhenNobodyWaitsForIt) {
  FaultStorage storage(1);
  ASSERT_TRUE(Save(storage, MakeJob(3, 1, 2), 10).ok());
  const auto reader = SnapshotReader::Open(storage, NewestOf(storage));
  ASSERT_TRUE(reader.ok()) << reader.status();
  int tensors = 0;
  const absl::Status status =
      (*reader)->VerifyAll([&](int64_t /*bytes*/) { return ++tensors < 2; });
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
  EXPECT_EQ(tensors, 2);
}

}  // namespace
}  // namespace dmuond::server::storage
