// main() of the lanes' tests on the fake driver: their lanes are dmuond-lane-fake, one device each,
// state, staging and arenas are memory of these devices.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cpu/cpu_memory.h"
#include "kernels/cuda/cuda_memory.h"
#include "tests/server/lane/harness.h"
#include "tests/server/lane/values.h"

namespace dmuond::server::lane::testing {
namespace {

// Seen by the test through a door that a real driver does not have.
Held Allocate(size_t bytes, int32_t lane) {
  Held held;
  auto holder = kernels::cuda::CudaMemoryHolder::Create(lane);
  EXPECT_TRUE(holder.ok()) << holder.status();
  auto fd = (*holder)->Allocate(bytes, "test");
  EXPECT_TRUE(fd.ok()) << fd.status();
  held.fd = *std::move(fd);
  const std::string path = "/proc/self/fd/" + std::to_string(held.fd.get());
  const wire::UniqueFd writable(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  auto mapping = kernels::cpu::MapShared(writable.get(), bytes);
  EXPECT_TRUE(mapping.ok()) << mapping.status();
  held.mapping = *std::move(mapping);
  return held;
}

int64_t LinesOf(const std::string& path) {
  std::ifstream file(path);
  return std::count(std::istreambuf_iterator<char>(file), {}, '\n');
}

// When the pieces of work of a kind began, of those that a device's log has after `before` lines.
std::vector<int64_t> BeginningsOf(const std::string& kind, const std::string& path,
                                  int64_t before) {
  std::ifstream file(path);
  std::vector<int64_t> beginnings;
  std::string line;
  for (int64_t number = 0; std::getline(file, line); ++number) {
    std::istringstream words(line);
    int64_t begin = 0;
    std::string end, process, stream, of_kind;
    words >> begin >> end >> process >> stream >> of_kind;
    if (number >= before && of_kind == kind) beginnings.push_back(begin);
  }
  return beginnings;
}

int64_t Now() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

// The lines of the device's log while the object lives.
class Logged {
 public:
  Logged()
      : folder_(std::filesystem::temp_directory_path() /
                ("lane_log_" + std::to_string(::getpid()))) {
    std::filesystem::create_directory(folder_);
    ::setenv("FAKE_CUDA_LOG", folder_.c_str(), 1);
  }
  ~Logged() {
    ::unsetenv("FAKE_CUDA_LOG");
    std::filesystem::remove_all(folder_);
  }
  Logged(const Logged&) = delete;
  Logged& operator=(const Logged&) = delete;
  [[nodiscard]] std::string Of(int device) const {
    return folder_ / ("device-" + std::to_string(device) + ".log");
  }
  [[nodiscard]] std::string Calls() const { return folder_ / "calls.log"; }

 private:
  const std::filesystem::path folder_;
};

// Copies that engines of both devices have made so far.
int64_t CopiesByEngine(const Logged& log) {
  return std::ssize(BeginningsOf("engine", log.Of(0), 0)) +
         std::ssize(BeginningsOf("engine", log.Of(1), 0));
}

// When each device's trainers were first told of new weights of the attempt under way. Trainers 0
// and 2 compute on device 0, 1 and 3 on device 1.
std::array<int64_t, 2> FirstTold(Cluster& cluster) {
  std::array<int64_t, 2> told{};
  std::jthread watch([&](const std::stop_token& stop) {
    for (bool last = false; !last;) {
      last = stop.stop_requested();
      for (int32_t rank = 0; rank < 4; ++rank) {
        for (int32_t b = 0; b < cluster.plan().buckets; ++b) {
          const bool is_new = cluster.Published(rank, b) >= cluster.attempt();
          if (is_new && told[rank % 2] == 0) told[rank % 2] = Now();
        }
      }
    }
  });
  cluster.WaitPublished();
  watch.request_stop();
  watch.join();
  return told;
}

// Weights after two steps of a replicated and a sharded matrix, and of one that nobody cuts evenly.
std::vector<float> AfterTwoSteps(const Cluster::Options& options,
                                 const std::function<void(Cluster&, int step)>& step) {
  scheduler::testing::World world(4, 1, 2);
  world.Replicate(scheduler::testing::Muon("a", {96, 64}))
      .Replicate(scheduler::testing::Muon("b", {64, 96}))
      .Replicate(scheduler::testing::AdamW("c", {300}))
      .ShardRows(scheduler::testing::Muon("d", {64, 48}));
  Cluster cluster(world, 1, 2, options);
  cluster.FillWeights([](int32_t, int32_t p, int64_t i) { return Value(0, p, i); });
  cluster.Push();
  for (int number = 1; number <= 2; ++number) {
    cluster.FillGradients(
        [number](int32_t rank, int32_t p, int64_t i) { return Value(rank + 7 * number, p, i); });
    step(cluster, number);
  }
  std::vector<float> all;
  for (const char* name : {"a", "b", "c", "d"}) {
    const std::vector<float> weights = cluster.Weights(name);
    all.insert(all.end(), weights.begin(), weights.end());
  }
  return all;
}

constexpr int64_t kRoomForAll = std::numeric_limits<int64_t>::max();

// Copies that bring a step's gradients to lanes' landings, where these have room for all.
int64_t Landing(Cluster& cluster) {
  int64_t copies = 0;
  for (int lane = 0; lane < 2; ++lane) {
    const scheduler::LaneProgram& program = cluster.program(lane);
    for (const scheduler::LaneUnit& of : program.units) {
      for (const scheduler::LaneCell& cell : of.cells) {
        copies += std::count_if(cell.leaves.begin(), cell.leaves.end(),
                                [&](const auto& leaf) { return program.IsFarAway(leaf); });
      }
    }
  }
  EXPECT_GT(copies, 0);
  return copies;
}

// Without MPS a kernel waits for the turn of the trainer that computes there, and the trainer for
// the kernel's: none begins before every trainer of the device has stored `submitted`, or after the
// first of them has heard of new weights. What copy engines can bring from the other device has
// landed by then, where there is room for it.
TEST(LaneOnFakeCudaTest, LaunchesNoKernelBesideATrainerThatTakesTurnsWithIt) {
  const Logged log;
  const auto plain = [](Cluster& cluster, int) { cluster.Step(); };
  const std::vector<float> expected = AfterTwoSteps({}, plain);
  ::setenv("FAKE_CUDA_MPS", "0", 1);
  ::setenv("FAKE_CUDA_DELAY_US", "500", 1);
  for (const bool lands : {false, true}) {
    const std::vector<float> weights = AfterTwoSteps(
        {.bucket_bytes = 16384, .landing_bytes_max = lands ? kRoomForAll : 0},
        [&](Cluster& cluster, int) {
          std::array<int64_t, 2> before{};
          for (int device = 0; device < 2; ++device) before[device] = LinesOf(log.Of(device));
          const auto begun = [&](const std::string& kind, int device) {
            return BeginningsOf(kind, log.Of(device), before[device]);
          };
          cluster.Open();
          const int64_t landing = lands ? Landing(cluster) : 0;  // copies
          for (int32_t rank = 0; rank < 4; ++rank) cluster.SignalReady(rank);
          for (int32_t rank = 0; rank < 4; ++rank) cluster.SubmitFromHost(rank);
          cluster.PumpUntil([&] {
            return std::ssize(begun("engine", 0)) + std::ssize(begun("engine", 1)) >= landing;
          });
          std::array<int64_t, 2> quiet{};
          for (const int32_t rank : {0, 1, 3, 2}) {
            quiet[rank % 2] = Now();
            cluster.StoreSubmitted(rank);
          }
          cluster.WaitGathered();
          cluster.Decide(scheduler::Verdict::kCommit);
          const std::array<int64_t, 2> told = FirstTold(cluster);
          for (int device = 0; device < 2; ++device) {
            const std::vector<int64_t> kernels = begun("kernel", device);
            ASSERT_FALSE(kernels.empty());
            EXPECT_GE(*std::min_element(kernels.begin(), kernels.end()), quiet[device]);
            EXPECT_LE(*std::max_element(kernels.begin(), kernels.end()), told[device]);
          }
        });
    EXPECT_EQ(weights, expected);
  }
  ::unsetenv("FAKE_CUDA_DELAY_US");
  ::setenv("FAKE_CUDA_MPS", "1", 1);
}

// The last gradient becomes ready when its device is quiet already. Copy engines bring a large one
// all the same, in a stream of their own, while kernels add up what has landed.
TEST(LaneOnFakeCudaTest, LandsWhatIsLargeInTheQuietToo) {
  const Logged log;
  scheduler::testing::World world(4, 1, 2);
  world.Replicate(scheduler::testing::Muon("a", {96, 64}))
      .Replicate(scheduler::testing::AdamW("last", {1024, 2048}));
  std::vector<float> expected;
  for (const bool turns : {false, true}) {
    ::setenv("FAKE_CUDA_MPS", turns ? "0" : "1", 1);
    Cluster cluster(world, 1, 2,
                    {.bucket_bytes = 16384, .landing_bytes_max = turns ? kRoomForAll : 0});
    cluster.FillWeights([](int32_t, int32_t p, int64_t i) { return Value(0, p, i); });
    cluster.Push();
    cluster.FillGradients([](int32_t rank, int32_t p, int64_t i) { return Value(rank, p, i); });
    const auto copies = [&log] { return CopiesByEngine(log); };
    const int64_t before = copies();
    cluster.Open();
    for (int32_t rank = 0; rank < 4; ++rank) {
      cluster.SubmitFromHost(rank);
      cluster.StoreSubmitted(rank);
    }
    for (int32_t rank = 0; rank < 4; ++rank) cluster.SignalReady(rank);
    cluster.WaitGathered();
    // Both sources on the other device, for the lane that owns most of `last`.
    EXPECT_EQ(copies() - before, turns ? 2 : 0);
    cluster.Decide(scheduler::Verdict::kCommit);
    cluster.WaitPublished();
    const std::vector<float> weights = cluster.Weights("last");
    if (turns) {
      EXPECT_TRUE(weights == expected);
    } else {
      expected = weights;
    }
  }
  ::setenv("FAKE_CUDA_MPS", "1", 1);
}

// With MPS the landing is smaller than what lands in it. Each bucket waits until sums have made
// room for it, whatever the order in which buckets become ready. The last one is read where it
// lies, and so is what has been overwritten when the loss scale turns out to be another.
TEST(LaneOnFakeCudaTest, ASmallLandingIsFilledAgainAndAgain) {
  const Logged log;
  scheduler::testing::World world(4, 1, 2);
  constexpr int kMatrices = 4;  // of 8 MiB: half of one lands for each of two trainers
  for (int i = 0; i < kMatrices; ++i) {
    world.Replicate(scheduler::testing::AdamW("w" + std::to_string(i), {1024, 2048}));
  }
  const auto gradient = [](int32_t rank, int32_t p, int64_t i) {
    return static_cast<float>((((i + p) * 40503 + rank) >> 3) & 255) - 128;
  };
  std::vector<std::vector<float>> expected;
  for (const int64_t room : {int64_t{0}, int64_t{20} << 20}) {
    Cluster cluster(world, 1, 2, {.bucket_bytes = 1 << 20, .landing_bytes_max = room});
    cluster.Push();
    cluster.FillGradients(gradient);
    const auto copies = [&log] { return CopiesByEngine(log); };
    ASSERT_EQ(cluster.plan().buckets, kMatrices);
    const int64_t expected_copies = room == 0 ? 0 : Landing(cluster) / kMatrices * (kMatrices - 1);
    for (int step = 1; step <= 3; ++step) {
      cluster.scalars.loss_scale = step < 3 ? 1 : 2;
      cluster.Open();
      const int64_t before = copies();
      const auto submit = [&] {
        for (int32_t rank = 0; rank < 4; ++rank) cluster.Submit(rank);
      };
      if (step == 1) submit();  // nothing is added up before a scale is known
      for (int32_t b = kMatrices - 1; b > 0; --b) {
        for (int32_t rank = 0; rank < 4; ++rank) cluster.SignalReady(rank, b);
      }
      cluster.PumpUntil([&] { return copies() - before == expected_copies; });
      if (step > 1) submit();
      for (int32_t rank = 0; rank < 4; ++rank) cluster.SignalReady(rank, 0);
      cluster.WaitGathered();
      EXPECT_EQ(copies() - before, expected_copies);
      cluster.Decide(scheduler::Verdict::kCommit);
      cluster.WaitPublished();
    }
    for (int i = 0; i < kMatrices; ++i) {
      const std::vector<float> weights = cluster.Weights("w" + std::to_string(i));
      if (room == 0) {
        expected.push_back(weights);
      } else {
        EXPECT_TRUE(weights == expected[i]) << i;
      }
    }
  }
}

// Copies within a device wait for room between the update's kernels. Those to another device, which
// engines do, are in other streams, and do not wait with them.
TEST(LaneOnFakeCudaTest, CopiesWithinADeviceHoldUpNoneToAnother) {
  const Logged log;
  scheduler::testing::World world(4, 1, 2);
  world.Replicate(scheduler::testing::Muon("a", {96, 64}))
      .Replicate(scheduler::testing::Muon("b", {64, 96}));
  Cluster cluster(world, 1, 2, {.bucket_bytes = 16384});
  cluster.FillWeights([](int32_t, int32_t p, int64_t i) { return Value(0, p, i); });
  cluster.Push();
  cluster.FillGradients([](int32_t rank, int32_t p, int64_t i) { return Value(rank, p, i); });
  cluster.Step();
  for (int device = 0; device < 2; ++device) {
    std::map<std::string, std::set<std::string>> of_copies;  // kinds of work by stream
    std::ifstream file(log.Of(device));
    for (std::string line; std::getline(file, line);) {
      std::istringstream words(line);
      std::string begin, end, process, stream, kind, name;
      words >> begin >> end >> process >> stream >> kind >> name;
      if (name == "cuMemcpyAsync") of_copies[process + stream].insert(kind);
    }
    std::set<std::string> all;
    for (const auto& [stream, kinds] : of_copies) {
      EXPECT_EQ(kinds.size(), 1) << stream;
      all.insert(kinds.begin(), kinds.end());
    }
    EXPECT_EQ(all, (std::set<std::string>{"engine", "kernel"}));
  }
}

// Links between devices sleep until late in the backward pass, when one step has shown how long it
// takes: then gradients of the other device come all at once, by copy engine or into sums.
TEST(LaneOnFakeCudaTest, GradientsOfOtherDevicesComeLateInASecondStep) {
  const Logged log;
  scheduler::testing::World world(4, 1, 2);
  for (const char* name : {"a", "b", "c", "d", "e", "f"}) {
    world.Replicate(scheduler::testing::Muon(name, {96, 64}));
  }
  for (const bool turns : {false, true}) {
    ::setenv("FAKE_CUDA_MPS", turns ? "0" : "1", 1);
    Cluster cluster(world, 1, 2,
                    {.bucket_bytes = 16384, .landing_bytes_max = turns ? kRoomForAll : 0});
    ASSERT_EQ(cluster.plan().buckets, 6);  // three are of each lane
    cluster.FillWeights([](int32_t, int32_t p, int64_t i) { return Value(0, p, i); });
    cluster.Push();
    cluster.FillGradients([](int32_t rank, int32_t p, int64_t i) { return Value(rank, p, i); });
    // Counts what both devices have begun to do.
    const auto begun = [&] {
      int64_t all = 0;
      for (const char* kind : {"engine", "kernel"}) {
        for (int device = 0; device < 2; ++device) {
          all += std::ssize(BeginningsOf(kind, log.Of(device), 0));
        }
      }
      return all;
    };
    // Each bucket 50 ms after the one before. Whether something began when only a third were there.
    const auto step = [&] {
      const int64_t before = begun();
      bool early = false;
      cluster.Open();
      for (int32_t rank = 0; rank < 4; ++rank) cluster.SubmitFromHost(rank);
      for (int32_t b = 0; b < cluster.plan().buckets; ++b) {
        for (int32_t rank = 0; rank < 4; ++rank) cluster.SignalReady(rank, b);
        const int64_t until = Now() + 50'000'000;
        cluster.PumpUntil([&] { return Now() >= until; });
        if (b == 1) early = begun() > before;
      }
      for (int32_t rank = 0; rank < 4; ++rank) cluster.StoreSubmitted(rank);
      cluster.WaitGathered();
      cluster.Decide(scheduler::Verdict::kCommit);
      cluster.WaitPublished();
      return early;
    };
    EXPECT_TRUE(step());
    // A machine that is busy elsewhere may stretch a step, and the next one begins too early.
    bool early = true;
    for (int steps = 0; early && steps < 10; ++steps) early = step();
    EXPECT_FALSE(early);
  }
  ::setenv("FAKE_CUDA_MPS", "1", 1);
}

// Calls that allocate, give back or wait, of the lanes' processes.
std::vector<std::string> CallsOfLanes(const std::string& path) {
  const std::string own = " pid=" + std::to_string(::getpid()) + " ";
  std::ifstream file(path);
  std::vector<std::string> calls;
  for (std::string line; std::getline(file, line);) {
    if (line.find(own) == std::string::npos) calls.push_back(line);
  }
  return calls;
}

// Everything is there when a lane is ready and trainers are attached.
TEST(LaneOnFakeCudaTest, StepsAllocateNothingAndWaitForNoDevice) {
  const Logged log;
  for (const bool lands : {false, true}) {
    ::setenv("FAKE_CUDA_MPS", lands ? "0" : "1", 1);
    scheduler::testing::World world(4, 1, 2);
    world.Replicate(scheduler::testing::Muon("a", {96, 64}))
        .Replicate(scheduler::testing::AdamW("b", {300}))
        .ShardRows(scheduler::testing::Muon("c", {64, 48}));
    Cluster cluster(world, 1, 2,
                    {.bucket_bytes = 16384, .landing_bytes_max = lands ? kRoomForAll : 0});
    cluster.FillWeights([](int32_t, int32_t p, int64_t i) { return Value(0, p, i); });
    cluster.Push();
    const auto before = std::ssize(CallsOfLanes(log.Calls()));
    ASSERT_GT(before, 0);
    for (int step = 1; step <= 4; ++step) {
      cluster.FillGradients(
          [step](int32_t rank, int32_t p, int64_t i) { return Value(rank + 7 * step, p, i); });
      cluster.Step();
      std::vector<std::string> calls = CallsOfLanes(log.Calls());
      calls.erase(calls.begin(), calls.begin() + before);
      EXPECT_THAT(calls, ::testing::IsEmpty()) << "step " << step;
    }
  }
  ::setenv("FAKE_CUDA_MPS", "1", 1);
}

// Nothing may be unmapped under queued work, or the driver ends the lane by a signal.
TEST(LaneOnFakeCudaTest, EndsWithWorkQueued) {
  const Logged log;
  ::setenv("FAKE_CUDA_DELAY_US", "20000", 1);
  for (const bool decided : {false, true}) {
    scheduler::testing::World world(2, 1, 1);
    for (int i = 0; i < 16; ++i) {
      world.Replicate(scheduler::testing::Muon("w" + std::to_string(i), {96, 64}));
    }
    Cluster cluster(world, 1, 1, {.bucket_bytes = 1024});
    cluster.Push();
    cluster.Open();
    const auto work_goes_on = [&log, before = LinesOf(log.Of(0))] {
      return LinesOf(log.Of(0)) > before;
    };
    for (const int32_t rank : {0, 1}) {
      cluster.SignalReady(rank);
      cluster.Submit(rank);
    }
    cluster.PumpUntil(work_goes_on);
    if (decided) {
      cluster.WaitGathered();
      const int64_t gathered = LinesOf(log.Of(0));
      cluster.Decide(scheduler::Verdict::kCommit);
      cluster.PumpUntil([&] { return LinesOf(log.Of(0)) > gathered; });
    }
    EXPECT_EQ(cluster.Shutdown(0), 0);
  }
  ::unsetenv("FAKE_CUDA_DELAY_US");
}

}  // namespace
}  // namespace dmuond::server::lane::testing

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  ::setenv("FAKE_CUDA_DEVICES", "4", 0);
  // As the CPU, whose tests these are: lanes and trainers compute side by side.
  ::setenv("FAKE_CUDA_MPS", "1", 1);
  dmuond::server::lane::testing::OtherDevice() = {
      "dmuond-lane-fake", [](int32_t lane) { return "cuda:" + std::to_string(lane); },
      dmuond::server::lane::testing::Allocate};
  return RUN_ALL_TESTS();
}
