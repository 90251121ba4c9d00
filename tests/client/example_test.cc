// The example trainer, as a user runs it.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/client/daemon_process.h"

namespace dmuond {
namespace {

using testing::ChildProcess;
using testing::DaemonProcess;

constexpr int kSteps = 60;

struct Training {
  std::vector<double> losses;  // by step
  double final_loss = 0;
};

Training Parse(const std::string& path) {
  std::ifstream file(path);
  Training run;
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string word;
    std::string name;
    int step = 0;
    double loss = 0;
    if (words >> word && word == "step" && words >> step >> name >> loss) {
      run.losses.push_back(loss);
    } else if (word == "final" && words >> name >> loss) {
      run.final_loss = loss;
    }
  }
  return run;
}

class ExampleTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string directory = std::filesystem::temp_directory_path() / "dmuond-example-XXXXXX";
    ASSERT_NE(::mkdtemp(directory.data()), nullptr);
    directory_ = directory;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  // All trainers of a job, to their end.
  std::vector<Training> Train(const std::string& devices, int world_size) {
    auto daemon = DaemonProcess::Start({.devices = devices});
    EXPECT_TRUE(daemon.ok()) << daemon.status();
    if (!daemon.ok()) return {};
    std::vector<std::unique_ptr<ChildProcess>> trainers;
    const auto output = [&](int rank) { return absl::StrCat(directory_, "/", rank); };
    for (int rank = 0; rank < world_size; ++rank) {
      std::filesystem::remove(output(rank));
      auto trainer = ChildProcess::Start(
          "dmuond-example-trainer",
          {"--address=" + (*daemon)->address(), absl::StrCat("--rank=", rank),
           absl::StrCat("--world_size=", world_size), absl::StrCat("--steps=", kSteps)},
          output(rank));
      EXPECT_TRUE(trainer.ok()) << trainer.status();
      trainers.push_back(*std::move(trainer));
    }
    std::vector<Training> runs;
    for (int rank = 0; rank < world_size; ++rank) {
      EXPECT_EQ(trainers[rank]->Wait(std::chrono::minutes(1)), 0) << "rank " << rank;
      runs.push_back(Parse(output(rank)));
      std::ifstream text(output(rank));
      if (HasFailure()) std::cerr << std::string(std::istreambuf_iterator<char>(text), {});
    }
    EXPECT_EQ((*daemon)->Stop(), 0);
    if (HasFailure()) std::cerr << (*daemon)->Log();
    return runs;
  }
  std::string directory_;
};

TEST_F(ExampleTest, ItsLossFalls) {
  const std::vector<Training> runs = Train("cpu:1", 1);
  ASSERT_EQ(runs.size(), 1);
  ASSERT_EQ(runs[0].losses.size(), kSteps);
  EXPECT_LT(runs[0].final_loss, 0.2 * runs[0].losses[0]);
}

// Both hold half of the rows, and the daemon averages: the same run, but for rounding.
TEST_F(ExampleTest, TwoTrainersOnTwoLanesFitTheSameNetwork) {
  const std::vector<Training> one = Train("cpu:1", 1);
  const std::vector<Training> two = Train("cpu:2", 2);
  ASSERT_EQ(two.size(), 2);
  ASSERT_EQ(one[0].losses.size(), kSteps);
  for (const Training& run : two) ASSERT_EQ(run.losses.size(), kSteps);
  for (int step = 0; step < kSteps; ++step) {
    EXPECT_NEAR((two[0].losses[step] + two[1].losses[step]) / 2, one[0].losses[step],
                0.05 * one[0].losses[0])
        << "step " << step + 1;
  }
}

}  // namespace
}  // namespace dmuond
