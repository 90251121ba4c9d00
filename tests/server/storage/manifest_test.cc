#include "server/storage/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "absl/strings/str_replace.h"
#include "server/storage/layout_check.h"
#include "tests/server/storage/fault_storage.h"
#include "tests/server/storage/snapshots.h"

namespace dmuond::server::storage {
namespace {

using ::testing::AllOf;
using testing::FaultStorage;
using ::testing::HasSubstr;
using testing::MakeJob;

v1::SnapshotManifest Saved() {
  FaultStorage storage(1);
  EXPECT_TRUE(testing::Save(storage, MakeJob(2, 2, 1), 7).ok());
  return SnapshotStore::Create(storage, testing::kJob)->Newest()->value().manifest;
}

TEST(ManifestTest, ComesBackAsItWentDoublesIncluded) {
  v1::SnapshotManifest manifest = Saved();
  v1::CostTable::Entry& entry = *manifest.mutable_plan()->mutable_costs()->add_entries();
  entry.set_microseconds(0.1 + 0.2);
  manifest.mutable_time()->set_seconds(1'795'000'000);
  EXPECT_FALSE(TookSeconds(manifest).has_value()) << "an older build did not say";
  manifest.mutable_took()->set_seconds(2);
  manifest.mutable_took()->set_nanos(500'000'000);
  EXPECT_EQ(TookSeconds(manifest), 2.5);
  const auto text = EncodeManifest(manifest);
  ASSERT_TRUE(text.ok()) << text.status();
  const auto parsed = ParseManifest(*text);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->plan().costs().entries(0).microseconds(), 0.1 + 0.2);
  v1::SnapshotManifest expected = manifest;
  expected.set_checksum(parsed->checksum());
  EXPECT_EQ(parsed->SerializeAsString(), expected.SerializeAsString());
}

TEST(ManifestTest, IsReadableByPeople) {
  const auto text = EncodeManifest(Saved());
  ASSERT_TRUE(text.ok());
  EXPECT_THAT(*text, AllOf(HasSubstr("\"job\": \"run7\""), HasSubstr("\"step\": \"7\""),
                           HasSubstr("\"lane-00001.safetensors\""), HasSubstr("ROUTE_MUON")));
}

TEST(ManifestTest, AnyChangeOfTheTextIsFound) {
  const std::string text = EncodeManifest(Saved()).value();
  const std::string changed = absl::StrReplaceAll(text, {{"\"step\": \"7\"", "\"step\": \"8\""}});
  ASSERT_NE(changed, text);
  const absl::Status status = ParseManifest(changed).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("checksum"));
  for (size_t size = 0; size < text.size(); size += 1 + size / 5) {
    EXPECT_EQ(ParseManifest(text.substr(0, size)).status().code(), absl::StatusCode::kDataLoss);
  }
}

TEST(ManifestTest, ANewerFormatIsRefusedByNumberEvenWithUnknownFields) {
  std::string text = EncodeManifest(Saved()).value();
  text = absl::StrReplaceAll(text, {{"\"format\": 1,", "\"format\": 2, \"compression\": [3],"}});
  ASSERT_TRUE(SealManifest(text).ok());
  const absl::Status status = ParseManifest(text).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("format 2"), HasSubstr("dmuond 0.1.0"), HasSubstr("format 1")));
}

TEST(ManifestTest, RefusesWhatNoSnapshotIs) {
  using Change = std::function<void(v1::SnapshotManifest&)>;
  const auto refuse = [](const char* why, const Change& change) {
    v1::SnapshotManifest manifest = Saved();
    change(manifest);
    const absl::Status status = EncodeManifest(manifest).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << why;
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  };
  refuse("job \"../run7\"", [](auto& m) { m.set_job("../run7"); });
  refuse("step -1", [](auto& m) { m.set_step(-1); });
  refuse("attempt 0", [](auto& m) { m.set_attempt(0); });
  refuse("world_size 0", [](auto& m) { m.set_world_size(0); });
  refuse("plan of 0 nodes", [](auto& m) { m.mutable_plan()->set_nodes(0); });
  refuse("2147483647 nodes", [](auto& m) { m.mutable_plan()->set_nodes(2147483647); });
  refuse("file lane-00000.safetensors is missing",
         [](auto& m) { m.mutable_files()->DeleteSubrange(0, 1); });
  refuse("is of lane 1 of 1", [](auto& m) { m.mutable_plan()->set_nodes(1); });
  refuse("twice", [](auto& m) { *m.add_files() = m.files(0); });
  refuse("must be called lane-00000.safetensors",
         [](auto& m) { m.mutable_files(0)->set_name("../../etc/passwd"); });
  refuse("unknown kind 0",
         [](auto& m) { m.mutable_files(0)->set_kind(v1::SnapshotFile::KIND_UNSPECIFIED); });
  refuse("bytes with a header of", [](auto& m) { m.mutable_files(0)->set_bytes(9); });
  refuse("bytes with a header of", [](auto& m) { m.mutable_files(0)->set_header_bytes(-1); });
  refuse("header_checksum \"xyz\"",
         [](auto& m) { m.mutable_files(0)->set_header_checksum("xyz"); });
  refuse("tensor checksum", [](auto& m) { m.mutable_files(0)->set_tensor_checksums(0, ""); });
  refuse("layout_hash", [](auto& m) { m.mutable_parameters(0)->set_shape(0, 7); });
  refuse("'norm'", [](auto& m) {
    for (auto& p : *m.mutable_parameters()) {
      if (p.name() == "norm") p.add_shape(int64_t{1} << 60);
    }
  });
  refuse("group", [](auto& m) { m.mutable_parameters(0)->set_group(3); });
}

// ---- layouts ----

struct LayoutOf2 {
  std::vector<scheduler::Parameter> parameters = {scheduler::testing::Muon("b", {6, 4}),
                                                  scheduler::testing::AdamW("a", {3}),
                                                  scheduler::testing::AdamW("kept", {2})};
  v1::SnapshotManifest manifest = [] {
    v1::SnapshotManifest groups;
    groups.add_groups();
    return groups;
  }();

  LayoutOf2() { parameters[2].route = scheduler::Route::kTrainer; }
  [[nodiscard]] JobLayout Get() const { return LayoutOf(parameters, manifest.groups()).value(); }
};

TEST(LayoutCheckTest, WhatStateDoesNotDependOnMayDiffer) {
  const LayoutOf2 saved;
  LayoutOf2 job;
  std::swap(job.parameters[0], job.parameters[1]);
  job.parameters[0].reduce_factor = 0.125;
  job.parameters[1].weight_type = scheduler::ElementType::kBF16;
  job.parameters[1].gradient_type = scheduler::ElementType::kF16;
  job.parameters[1].ready_order = 9;
  job.parameters[1].route_reason = "by hand";
  job.parameters.pop_back();  // the trainer's own
  EXPECT_TRUE(CheckCompatible(saved.Get(), job.Get()).ok());
  EXPECT_EQ(LayoutHash(saved.Get()), LayoutHash(job.Get()));
}

TEST(LayoutCheckTest, NamesTheFirstParameterThatDiffersAndBothValues) {
  using Change = std::function<void(LayoutOf2&)>;
  const auto refuse = [](const std::string& why, const Change& change) {
    const LayoutOf2 saved;
    LayoutOf2 job;
    change(job);
    const absl::Status status = CheckCompatible(saved.Get(), job.Get());
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << why;
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
    EXPECT_NE(LayoutHash(saved.Get()), LayoutHash(job.Get())) << why;
  };
  refuse("\"b\" has the shape 6x4 in the snapshot and 4x6 in the job", [](auto& j) {
    j.parameters[0].shape = {4, 6};
  });
  refuse(
      "\"a\" has the route adamw in the snapshot and muon in the job: to go on, give it the "
      "snapshot's, in Python by route=[(\"a\", \"adamw\")]",
      [](auto& j) {
        j.parameters[1] = scheduler::testing::Muon("a", {3, 1});
        j.parameters[0].shape = {4, 6};  // "b" differs too; "a" comes first
      });
  refuse("\"b\" has the matrices whole in the snapshot and 2 heads in the job", [](auto& j) {
    j.parameters[0].view = {.kind = scheduler::MatrixView::Kind::kHeads, .heads = 2};
  });
  refuse("\"b\" has the form of momentum sum in the snapshot and ema in the job", [](auto& j) {
    j.manifest.mutable_groups(0)->set_momentum(v1::GroupConfig::MOMENTUM_EMA);
  });
  refuse("\"c\" is trained by the daemon in the job and not in the snapshot",
         [](auto& j) { j.parameters.push_back(scheduler::testing::AdamW("c", {1})); });
  refuse("\"b\" is trained by the daemon in the snapshot and not in the job",
         [](auto& j) { j.parameters[0].route = scheduler::Route::kTrainer; });
  refuse("\"kept\" is trained by the daemon in the job and not in the snapshot",
         [](auto& j) { j.parameters[2].route = scheduler::Route::kAdamW; });
}

}  // namespace
}  // namespace dmuond::server::storage
