// Names of tensors, directories, files and jobs.
#include <gtest/gtest.h>

#include <string>

#include "server/storage/snapshot_name.h"
#include "server/storage/tensor_name.h"

namespace dmuond::server::storage {
namespace {

using scheduler::Box;

TEST(TensorNameTest, WholeParametersHaveNoBox) {
  EXPECT_EQ(TensorNameOf("w", {4, 6}, StateTensor::kMomentum, {{0, 0}, {4, 6}}), "w/momentum");
  EXPECT_EQ(TensorNameOf("s", {}, StateTensor::kExpAvg, {}), "s/exp_avg");
  const auto name = ParseTensorName("a/b/exp_avg_sq");
  ASSERT_TRUE(name.has_value());
  EXPECT_EQ(*name, (TensorName{"a/b", StateTensor::kExpAvgSq, std::nullopt}));
}

TEST(TensorNameTest, PartsNameTheirBox) {
  const std::string name = TensorNameOf("w", {4, 6}, StateTensor::kUpdates, {{1, 0}, {4, 6}});
  EXPECT_EQ(name, "w/updates[1:4,0:6]");
  EXPECT_EQ(ParseTensorName(name), (TensorName{"w", StateTensor::kUpdates, Box{{1, 0}, {4, 6}}}));
}

TEST(TensorNameTest, ParametersMayBeCalledLikeTensors) {
  const std::string name = TensorNameOf("w/master[0:2]", {4}, StateTensor::kMaster, {{0}, {4}});
  EXPECT_EQ(ParseTensorName(name),
            (TensorName{"w/master[0:2]", StateTensor::kMaster, std::nullopt}));
}

TEST(TensorNameTest, RefusesWhatIsNoName) {
  for (const char* name :
       {"", "w", "/master", "w/", "w/weights", "w/master[", "w/master[]", "w/master[1]",
        "w/master[2:1]", "w/master[1:1]", "w/master[-1:1]", "w/master[01:2]", "w/master[1:2,]",
        "w/master[1:2]x", "w/master[1:99999999999999999999]", "w/master[ 1:2]", "w/master[+1:2]",
        "w/master[0:1,0:1,0:1,0:1,0:1,0:1,0:1,0:1,0:1]"}) {
    EXPECT_FALSE(ParseTensorName(name).has_value()) << name;
  }
}

TEST(SnapshotNameTest, DirectoryNamesComeBackAndSortBySteps) {
  const SnapshotId id{scheduler::MakeAttempt(scheduler::GroupEpoch(3), 1105),
                      scheduler::StepId(1200)};
  EXPECT_EQ(DirectoryName(id), "step-000000001200.3.1105");
  EXPECT_EQ(ParseDirectoryName("step-000000001200.3.1105"), id);
  const SnapshotId later{scheduler::MakeAttempt(scheduler::GroupEpoch(4), 1),
                         scheduler::StepId(1000)};
  EXPECT_LT(id, later) << "the attempt decides which is newer";
}

TEST(SnapshotNameTest, OneSpellingForEachDirectory) {
  for (const char* name : {"step-1200.3.1105", "step-000000001200.3", "step-000000001200.3.1105.",
                           "step-000000001200.03.1105", "step--00000001200.3.1", "lost+found", "",
                           "step-000000001200.3.4294967296"}) {
    EXPECT_FALSE(ParseDirectoryName(name).has_value()) << name;
  }
}

TEST(SnapshotNameTest, FileNamesLeaveNoDirectory) {
  EXPECT_TRUE(IsFileName(StateFileName(scheduler::LaneId(0))));
  EXPECT_TRUE(IsFileName(StateFileName(scheduler::LaneId(65535))));
  EXPECT_TRUE(IsFileName(TrainersFileName(scheduler::NodeRank(17))));
  for (const char* name : {"manifest.json", "lane-.safetensors", "lane-0000/.safetensors",
                           "../lane-00000.safetensors", "lane-00000.safetensors.tmp", ""}) {
    EXPECT_FALSE(IsFileName(name)) << name;
  }
}

TEST(SnapshotNameTest, JobNamesAreDirectories) {
  EXPECT_TRUE(CheckJobName("run-7_b.2").ok());
  EXPECT_TRUE(CheckJobName(std::string(128, 'a')).ok());
  for (const std::string& job :
       {std::string(), std::string("."), std::string(".."), std::string("a/b"),
        std::string(".hidden"), std::string("a\0b", 3), std::string("ü"), std::string(129, 'a')}) {
    EXPECT_EQ(CheckJobName(job).code(), absl::StatusCode::kInvalidArgument) << job;
  }
}

}  // namespace
}  // namespace dmuond::server::storage
