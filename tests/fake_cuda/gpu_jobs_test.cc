// Jobs on GPUs, whole: the daemon, lanes as processes, trainers of the C++ client on streams of
// their own, arenas that the daemon has made. Weights have the bits of the same job on the CPU,
// whose operations the doubles of the kernels are.
#include <cuda.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "dmuond/client/device_arenas.h"
#include "dmuond/client/session.h"
#include "tests/client/daemon_process.h"
#include "tests/fake_cuda/driver/fake_cuda.h"
#include "tests/fake_cuda/fake_machine.h"
#include "tests/fake_cuda/gpu_trainers.h"
#include "tests/server/daemon/support.h"
#include "tests/server/system/daemon_status.h"

namespace dmuond::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kDevices = 4;

class GpuJobsTest : public ::testing::Test {
 protected:
  void TearDown() override {
    if (HasFailure() && daemon_ != nullptr) std::cerr << daemon_->Log();
  }
  void StartDaemon(const std::string& devices, std::vector<std::string> flags = {}) {
    daemon_.reset();  // which has the devices
    if (devices.starts_with("cuda")) flags.push_back(FakeMachine::LaneFlag());
    auto daemon = DaemonProcess::Start({.devices = devices, .flags = std::move(flags)});
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }
  Weights RunOnGpus(int32_t world, const std::vector<int>& devices,
                    const std::function<void(int64_t)>& between = {}, bool own_memory = false) {
    return RunJob(
        world,
        [&](int32_t rank) {
          auto trainer = std::make_unique<GpuTrainer>(daemon_->address(), rank, world,
                                                      devices[rank % devices.size()]);
          if (own_memory) trainer->HaveMemory();
          return trainer;
        },
        between);
  }
  Weights RunOnCpu(int32_t world, const std::string& devices) {
    StartDaemon(devices);
    return RunJob(world, [&](int32_t rank) {
      return std::make_unique<Trainer>(daemon_->address(), rank, world);
    });
  }

  FakeMachine machine_{kDevices};
  std::unique_ptr<DaemonProcess> daemon_;
};

// The lanes of the daemon.
std::vector<v1::LaneStatus> LanesOf(const DaemonProcess& daemon) {
  const v1::GetStatusReply status = DaemonStatus(daemon.address()).Get();
  return {status.lanes().begin(), status.lanes().end()};
}

std::string EnvironmentOf(int64_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/environ"));
  std::string text(std::istreambuf_iterator<char>(file), {});
  std::ranges::replace(text, '\0', '\n');
  return text;
}

TEST_F(GpuJobsTest, OneTrainerAndOneLaneHaveTheBitsOfTheCpu) {
  const Weights expected = RunOnCpu(1, "cpu:1");
  StartDaemon("cuda:1");
  EXPECT_EQ(RunOnGpus(1, {0}), expected);
  EXPECT_EQ(daemon_->Stop(), 0);
}

TEST_F(GpuJobsTest, FourOfEachHaveTheBitsOfTheCpu) {
  const Weights expected = RunOnCpu(4, "cpu:4");
  StartDaemon("cuda:4");
  EXPECT_EQ(RunOnGpus(4, {0, 1, 2, 3}), expected);
  EXPECT_EQ(daemon_->Stop(), 0);
}

TEST_F(GpuJobsTest, TrainersShareDevicesAndHaveSomeWithoutALane) {
  const Weights expected = RunOnCpu(4, "cpu:2");
  StartDaemon("cuda:3,1");
  EXPECT_EQ(RunOnGpus(4, {1, 2, 1, 0}), expected);
}

TEST_F(GpuJobsTest, LanesHaveTheirDeviceAndTheUsersMps) {
  machine_.Set("CUDA_MPS_PIPE_DIRECTORY", "/run/mps");
  for (const bool off : {false, true}) {
    StartDaemon("cuda:2,0", {off ? "--mps=off" : "--mps=auto"});
    RunOnGpus(1, {0}, [&](int64_t) {
      const std::vector<v1::LaneStatus> lanes = LanesOf(*daemon_);
      ASSERT_EQ(lanes.size(), 2);
      EXPECT_THAT(lanes[0].device(), HasSubstr(FakeMachine::Uuid(2)));
      EXPECT_THAT(lanes[1].device(), HasSubstr(FakeMachine::Uuid(0)));
      const std::string environment = EnvironmentOf(lanes[0].pid());
      EXPECT_THAT(environment, HasSubstr("CUDA_MODULE_LOADING=EAGER"));
      EXPECT_THAT(environment,
                  HasSubstr(absl::StrCat("CUDA_MPS_PIPE_DIRECTORY=",
                                         off ? daemon_->address() + ".no-mps" : "/run/mps", "\n")));
    });
  }
}

// The server of MPS recovers from the fault of another client.
TEST_F(GpuJobsTest, LanesWaitForAnMpsServerThatIsNotReady) {
  const Weights expected = RunOnCpu(1, "cpu:1");
  machine_.Set("FAKE_CUDA_NOT_READY", "3");
  StartDaemon("cuda:1");
  EXPECT_EQ(RunOnGpus(1, {0}), expected);
}

TEST_F(GpuJobsTest, ALaneThatDiesCostsNoStepAndNoOtherProcess) {
  StartDaemon("cuda:2");
  const Weights expected = RunOnGpus(2, {0, 1});
  std::array<std::set<pid_t>, 2> processes;
  std::array<size_t, 2> kills{};
  EXPECT_EQ(RunOnGpus(2, {0, 1},
                      [&](int64_t step) {
                        const std::vector<v1::LaneStatus> lanes = LanesOf(*daemon_);
                        for (int lane = 0; lane < 2; ++lane) {
                          processes[lane].insert(static_cast<pid_t>(lanes[lane].pid()));
                        }
                        if (step % 2 != 0 || step == kSteps) return;
                        const int victim = static_cast<int>(step / 2 % 2);
                        ++kills[victim];
                        ::kill(static_cast<pid_t>(lanes[victim].pid()), SIGKILL);
                      }),
            expected);
  for (int lane = 0; lane < 2; ++lane) EXPECT_EQ(processes[lane].size(), 1 + kills[lane]) << lane;
}

// By process, how often one of these lanes has measured.
std::map<int64_t, int> MeasuredBy(const std::filesystem::path& calls) {
  std::map<int64_t, int> times;
  std::ifstream file(calls);
  for (std::string line; std::getline(file, line);) {
    int64_t pid = 0;
    if (std::sscanf(line.c_str(), "%*s pid=%" SCNd64, &pid) != 1) continue;
    times[pid] += line.ends_with(" measure a tile") ? 1 : 0;
  }
  return times;
}

TEST_F(GpuJobsTest, AReplacementMeasuresNothingThatItsPredecessorHas) {
  const server::TempDir log;
  machine_.Set("FAKE_CUDA_LOG", log.path());
  StartDaemon("cuda:1");
  std::vector<int64_t> lanes;
  RunOnGpus(1, {0}, [&](int64_t step) {
    const int64_t pid = LanesOf(*daemon_)[0].pid();
    if (lanes.empty() || lanes.back() != pid) lanes.push_back(pid);
    if (step == 2) ::kill(static_cast<pid_t>(pid), SIGKILL);
  });
  RunOnGpus(1, {0}, [&](int64_t step) {  // the next job's
    if (step == 1) lanes.push_back(LanesOf(*daemon_)[0].pid());
  });
  ASSERT_EQ(lanes.size(), 3U);
  const std::map<int64_t, int> measured = MeasuredBy(log / "calls.log");
  EXPECT_GT(measured.at(lanes[0]), 0);
  EXPECT_EQ(measured.at(lanes[1]), 0);
  EXPECT_EQ(measured.at(lanes[2]), 0);
}

TEST_F(GpuJobsTest, AReplacementFindsTheWeightsInItsArenas) {
  StartDaemon("cuda:1");
  const Weights expected = RunOnGpus(1, {0});
  auto trainer = std::make_unique<GpuTrainer>(daemon_->address(), 0, 1, 0);
  trainer->Begin();
  for (int64_t step = 1; step <= 3; ++step) trainer->Step();
  const Weights after = trainer->Read();
  trainer.reset();
  trainer = std::make_unique<GpuTrainer>(daemon_->address(), 0, 1, 0, client::Resume::kRequire);
  trainer->Begin();
  EXPECT_EQ(trainer->Read(), after);
  // On another device they are written into new ones.
  trainer.reset();
  trainer = std::make_unique<GpuTrainer>(daemon_->address(), 0, 1, 2, client::Resume::kRequire);
  trainer->Begin();
  EXPECT_EQ(trainer->Read(), after);
  for (int64_t step = 4; step <= kSteps; ++step) trainer->Step();
  EXPECT_EQ(trainer->Read(), expected);
  EXPECT_TRUE(trainer->session().Close().ok());
}

// Whether a process has mapped memory that `address` lies in: the fake driver's buffers are files.
bool HasMapped(int64_t pid, CUdeviceptr address) {
  unsigned long long inode = 0;
  EXPECT_EQ(cuPointerGetAttribute(&inode, CU_POINTER_ATTRIBUTE_BUFFER_ID, address), CUDA_SUCCESS);
  std::ifstream maps(absl::StrCat("/proc/", pid, "/maps"));
  for (std::string line; std::getline(maps, line);) {
    const std::vector<std::string> fields = absl::StrSplit(line, ' ', absl::SkipEmpty());
    if (fields.size() > 4 && fields[4] == absl::StrCat(inode)) return true;
  }
  return false;
}

TEST_F(GpuJobsTest, TrainersMemoryOfTheirOwnHasTheBitsOfTheCpu) {
  const Weights expected = RunOnCpu(4, "cpu:4");
  StartDaemon("cuda:4");
  EXPECT_EQ(RunOnGpus(4, {0, 1, 2, 3}, {}, /*own_memory=*/true), expected);
  EXPECT_EQ(daemon_->Stop(), 0);
}

TEST_F(GpuJobsTest, ANewLaneOpensTheMemoryThatTrainersHave) {
  StartDaemon("cuda:2");
  const Weights expected = RunOnGpus(2, {0, 1});
  const auto kill = [&](int64_t step) {
    if (step % 2 != 0) return;
    ::kill(static_cast<pid_t>(LanesOf(*daemon_)[step / 2 % 2].pid()), SIGKILL);
  };
  EXPECT_EQ(RunOnGpus(2, {0, 1}, kill, /*own_memory=*/true), expected);
}

TEST_F(GpuJobsTest, MemoryOfItsOwnIsUnmappedBeforeARankComesAgainAndWhenItHasClosed) {
  StartDaemon("cuda:2");
  const Weights expected = RunOnGpus(1, {0});
  auto dead = std::make_unique<GpuTrainer>(daemon_->address(), 0, 1, 0);
  dead->HaveMemory();
  dead->Begin();
  for (int64_t step = 1; step <= 3; ++step) dead->Step();
  const Weights after = dead->Read();
  const std::vector<v1::LaneStatus> lanes = LanesOf(*daemon_);
  for (const v1::LaneStatus& lane : lanes) EXPECT_TRUE(HasMapped(lane.pid(), dead->own()));
  // Its session ends without Close(), and its memory is still there.
  dead->Abandon();
  GpuTrainer trainer(daemon_->address(), 0, 1, 0, client::Resume::kRequire);
  for (const v1::LaneStatus& lane : lanes) EXPECT_FALSE(HasMapped(lane.pid(), dead->own()));
  dead.reset();
  trainer.HaveMemory();
  trainer.Begin();
  EXPECT_EQ(trainer.Read(), after);
  for (int64_t step = 4; step <= kSteps; ++step) trainer.Step();
  EXPECT_EQ(trainer.Read(), expected);
  EXPECT_TRUE(trainer.session().Close().ok());
  for (const v1::LaneStatus& lane : lanes) EXPECT_FALSE(HasMapped(lane.pid(), trainer.own()));
}

TEST_F(GpuJobsTest, MemoryWithoutAHandleIsRefusedWithWhatToSet) {
  StartDaemon("cuda:1");
  const auto refused = [&](CUdeviceptr memory) {
    GpuTrainer trainer(daemon_->address(), 0, 1, 0);
    client::Layout layout = Parameters(1);
    layout.arenas[1].memory = reinterpret_cast<std::byte*>(memory);
    EXPECT_TRUE(trainer.session().Register(layout).ok());
    const absl::Status status = trainer.session().Attach();
    EXPECT_EQ(client::ReasonOf(status), "ARENA_INVALID") << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("arena 2"));
    EXPECT_TRUE(trainer.session().Close().ok());
    return std::string(status.message());
  };
  CUcontext context = nullptr;
  MUST(cuDevicePrimaryCtxRetain(&context, 0));
  MUST(cuCtxSetCurrent(context));
  constexpr size_t kBytes = size_t{1} << 20;
  CUdeviceptr memory = 0;
  MUST(cuMemAllocAsync(&memory, kBytes, nullptr));
  const auto what_to_set = AllOf(HasSubstr("PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF"),
                                 HasSubstr("expandable_segments"), HasSubstr("cudaMallocAsync"));
  EXPECT_THAT(refused(memory), what_to_set);
  // As PyTorch's allocator has it with expandable_segments: across the end of a piece.
  constexpr size_t kPiece = size_t{2} << 20;
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, 0},
                               CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = access.location;
  CUdeviceptr pieces = 0;
  MUST(cuMemAddressReserve(&pieces, 2 * kPiece, 0, 0, 0));
  for (const CUdeviceptr at : {pieces, pieces + kPiece}) {
    CUmemGenericAllocationHandle piece = 0;
    MUST(cuMemCreate(&piece, kPiece, &properties, 0));
    MUST(cuMemMap(at, kPiece, 0, piece, 0));
  }
  MUST(cuMemSetAccess(pieces, 2 * kPiece, &access, 1));
  EXPECT_THAT(refused(pieces + kPiece - 256), what_to_set);
  CUdeviceptr short_one = 0;
  MUST(cuMemAlloc(&short_one, 4096));
  CUdeviceptr base = 0;
  size_t whole = 0;
  MUST(cuMemGetAddressRange(&base, &whole, short_one));
  EXPECT_THAT(refused(base + whole - 64), HasSubstr("within their allocation"));
  EXPECT_THAT(refused(short_one + 8), HasSubstr("multiple of 16"));
  EXPECT_THAT(refused(64), HasSubstr("no memory of a GPU"));
  MUST(cuCtxSetCurrent(context));
  MUST(cuMemFree(short_one));
}

// State leaves the device by a ring of pinned memory, and comes back.
TEST_F(GpuJobsTest, AJobGoesBackToASnapshotOfItsDevices) {
  const server::TempDir directory;
  StartDaemon("cuda:2", {"--snapshot_dir=" + directory.path(), "--snapshot_staging_bytes=1048576"});
  GpuTrainer trainer(daemon_->address(), 0, 1, 1);
  trainer.Begin();
  for (int64_t step = 1; step <= 3; ++step) trainer.Step();
  const Weights after = trainer.Read();
  const auto momentum = trainer.session().Pull(0, client::StateKind::kMomentum);
  ASSERT_TRUE(momentum.ok()) << momentum.status();
  const auto snapshot = trainer.session().SaveSnapshot();
  ASSERT_TRUE(snapshot.ok()) << snapshot.status();
  EXPECT_EQ(snapshot->step, 3);
  for (int64_t step = 4; step <= kSteps; ++step) trainer.Step();
  const Weights expected = trainer.Read();
  ASSERT_TRUE(trainer.session().LoadSnapshot(3).ok());
  const auto back = trainer.session().Step(kScalars);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->kind, Outcome::Kind::kRolledBack);
  EXPECT_EQ(trainer.session().last_committed_step(), 3);
  EXPECT_EQ(trainer.Read(), after);
  EXPECT_EQ(*trainer.session().Pull(0, client::StateKind::kMomentum), *momentum);
  for (int64_t step = 4; step <= kSteps; ++step) trainer.Step();
  EXPECT_EQ(trainer.Read(), expected);
}

// The state after two steps is in a snapshot then.
void StepTwiceAndSave(GpuTrainer& trainer) {
  trainer.Begin();
  trainer.StepAndWait();
  trainer.StepAndWait();
  ASSERT_TRUE(trainer.session().SaveSnapshot().ok());
}

// The successor's arenas take the place of the ones that the trainer has mapped.
TEST_F(GpuJobsTest, ATrainerCarriesOnWithItsDaemonsSuccessor) {
  const server::TempDir directory;
  StartDaemon("cuda:1", {"--snapshot_dir=" + directory.path()});
  const Weights expected = RunOnGpus(1, {0});
  GpuTrainer trainer(daemon_->address(), 0, 1, 0, client::Resume::kDiscard);
  ASSERT_NO_FATAL_FAILURE(StepTwiceAndSave(trainer));
  const std::byte* const weight = trainer.session().WeightBytes(0);
  daemon_->Kill();
  ASSERT_TRUE(daemon_->StartAgain().ok());
  for (int64_t step = 3; step <= kSteps; ++step) trainer.StepAndWait();
  EXPECT_EQ(trainer.session().WeightBytes(0), weight);
  EXPECT_EQ(trainer.Read(), expected);
}

// Gradients are still on their way when the successor's arenas take the place of the old ones.
TEST_F(GpuJobsTest, GradientsThatAreOnTheirWayReachTheDaemonsSuccessor) {
  const server::TempDir directory;
  StartDaemon("cuda:1", {"--snapshot_dir=" + directory.path()});
  const Weights expected = RunOnGpus(1, {0});
  GpuTrainer trainer(daemon_->address(), 0, 1, 0, client::Resume::kDiscard);
  ASSERT_NO_FATAL_FAILURE(StepTwiceAndSave(trainer));
  daemon_->Kill();
  ASSERT_TRUE(daemon_->StartAgain().ok());
  void* pinned = nullptr;
  MUST(cuMemHostAlloc(&pinned, 4096, 0));
  auto* const gate = static_cast<std::atomic<uint64_t>*>(pinned);
  gate->store(0);
  MUST(cuStreamWaitValue64(trainer.stream(), reinterpret_cast<CUdeviceptr>(pinned), 1,
                           CU_STREAM_WAIT_VALUE_GEQ));
  std::thread opener([gate] {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    gate->store(1);
  });
  for (int64_t step = 3; step <= kSteps; ++step) trainer.Step();
  EXPECT_EQ(trainer.Read(), expected);
  opener.join();
  MUST(cuMemFreeHost(pinned));
}

// What is said now is not overtaken by what a stream was to say before.
TEST_F(GpuJobsTest, WordsAreStoredInTheOrderOfTheCalls) {
  const std::shared_ptr<client::Arenas> arenas = *DeviceArenas::Open(0);
  CUcontext context = nullptr;
  MUST(cuDevicePrimaryCtxRetain(&context, 0));
  MUST(cuCtxSetCurrent(context));
  CUstream stream = nullptr;
  MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  void* pinned = nullptr;
  MUST(cuMemHostAlloc(&pinned, 4096, 0));
  auto* const gate = static_cast<std::atomic<uint64_t>*>(pinned);
  gate->store(0);
  alignas(4096) static std::array<uint64_t, 512> page{};
  auto words = arenas->MakeWords(page.data(), sizeof(page));
  ASSERT_TRUE(words.ok()) << words.status();
  MUST(cuStreamWaitValue64(stream, reinterpret_cast<CUdeviceptr>(pinned), 1,
                           CU_STREAM_WAIT_VALUE_GEQ));
  uint64_t* const word = &page[3];
  ASSERT_TRUE((*words)->StoreAfter(stream, {&word, 1}, 5).ok());
  ASSERT_TRUE((*words)->StoreAfter(std::nullopt, {&word, 1}, 6).ok());
  EXPECT_EQ(std::atomic_ref(page[3]).load(), 0);
  gate->store(1);
  EXPECT_TRUE((*words)->Finish().ok());
  EXPECT_EQ(std::atomic_ref(page[3]).load(), 6);
  words->reset();
  MUST(cuStreamDestroy(stream));
  MUST(cuMemFreeHost(pinned));
}

// A process of which an event holds up a stream takes its turns on the GPU from its lane.
TEST_F(GpuJobsTest, NoEventHoldsUpAStreamWhileWeightsAreAwaited) {
  const std::shared_ptr<client::Arenas> arenas = *DeviceArenas::Open(0);
  CUcontext context = nullptr;
  MUST(cuDevicePrimaryCtxRetain(&context, 0));
  MUST(cuCtxSetCurrent(context));
  CUstream stream = nullptr;
  MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  alignas(4096) static std::array<uint64_t, 512> page{};
  auto words = arenas->MakeWords(page.data(), sizeof(page));
  ASSERT_TRUE(words.ok()) << words.status();
  uint64_t* const published = &page[2];
  uint64_t* const ready = &page[3];
  ASSERT_TRUE((*words)->WaitFor(stream, {&published, 1}, 1).ok());
  ASSERT_TRUE((*words)->StoreAfter(stream, {&ready, 1}, 5).ok());
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(200);
  int held_up = 0;
  while (std::chrono::steady_clock::now() < end) {
    held_up = std::max(held_up, fakeCudaHeldUpByEvents());
  }
  EXPECT_EQ(held_up, 0);
  EXPECT_EQ(std::atomic_ref(page[3]).load(), 0);
  std::atomic_ref(page[2]).store(1);
  EXPECT_TRUE((*words)->Finish().ok());
  EXPECT_EQ(std::atomic_ref(page[3]).load(), 5);
  words->reset();
  MUST(cuStreamDestroy(stream));
}

TEST_F(GpuJobsTest, AWithdrawnAttemptAndItsSuccessorAreSignalledByStreamAndHost) {
  StartDaemon("cuda:1");
  const Weights expected = RunOnGpus(1, {0});
  GpuTrainer trainer(daemon_->address(), 0, 1, 0);
  trainer.Begin();
  for (int64_t step = 1; step <= kSteps; ++step) {
    // Withdrawn: the attempt that the stream has signalled, or is about to, ends.
    ASSERT_TRUE(trainer.session().MarkReady(0, trainer.stream()).ok());
    const auto withdrawn = trainer.session().Submit(kScalars, {.withdraw = true});
    ASSERT_TRUE(withdrawn.ok()) << withdrawn.status();
    ASSERT_EQ(withdrawn->kind, Outcome::Kind::kAborted);
    trainer.StepAndWait();
  }
  EXPECT_EQ(trainer.Read(), expected);
}

TEST_F(GpuJobsTest, AStreamOfATrainerOnTheProcessorIsRefused) {
  StartDaemon("cpu:1");
  Trainer trainer(daemon_->address(), 0, 1);
  trainer.Begin();
  EXPECT_EQ(client::ReasonOf(trainer.session().MarkReady(0, nullptr)), "SESSION_STATE");
  EXPECT_EQ(client::ReasonOf(trainer.session().WaitPublished(nullptr)), "SESSION_STATE");
  EXPECT_TRUE(absl::IsNotFound(DeviceArenas::Open(kDevices).status()));
}

}  // namespace
}  // namespace dmuond::testing
