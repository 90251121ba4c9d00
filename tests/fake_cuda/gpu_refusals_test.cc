// What daemons with GPU lanes refuse, by name: devices that cannot be theirs, trainers and arenas
// that no lane could reach, memory that is not there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/client/daemon_group.h"
#include "tests/client/daemon_process.h"
#include "tests/fake_cuda/fake_machine.h"
#include "tests/server/system/disk_driver.h"
#include "tests/server/system/expect_error.h"
#include "tests/server/system/raw_trainer.h"

namespace dmuond::testing {
namespace {

using absl::StatusCode;
using ::testing::AllOf;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

constexpr std::chrono::seconds kEndsWithin{30};

class GpuRefusalsTest : public ::testing::Test {
 protected:
  void TearDown() override {
    if (HasFailure() && daemon_ != nullptr) std::cerr << daemon_->Log();
  }
  // Ends by itself; its log.
  static std::string RefusedStart(std::vector<std::string> flags) {
    std::string directory = fs::temp_directory_path() / "dmuond-gpus-XXXXXX";
    EXPECT_NE(::mkdtemp(directory.data()), nullptr);
    flags.push_back("--socket=" + directory + "/d.sock");
    const std::string log = directory + "/log";
    auto process = ChildProcess::Start("dmuond", std::move(flags), log);
    EXPECT_TRUE(process.ok()) << process.status();
    EXPECT_EQ((*process)->Wait(kEndsWithin), 1);
    std::ifstream file(log);
    std::string text(std::istreambuf_iterator<char>(file), {});
    EXPECT_FALSE(fs::exists(directory + "/d.sock.no-mps")) << "left behind";
    fs::remove_all(directory);
    return text;
  }
  void StartDaemon(const std::string& devices, std::vector<std::string> flags = {}) {
    flags.push_back(FakeMachine::LaneFlag());
    auto daemon = DaemonProcess::Start({.devices = devices, .flags = std::move(flags)});
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }
  absl::Status Open(RawTrainer& trainer, const std::string& uuid) {
    trainer.set_device_uuid(uuid);
    return trainer.Open();
  }
  absl::Status Attach(RawTrainer& trainer, const v1::AttachBuffersRequest& request) {
    v1::AttachBuffersReply reply;
    return trainer.Call(request, &reply);
  }

  FakeMachine machine_{2};
  std::unique_ptr<DaemonProcess> daemon_;
};

TEST_F(GpuRefusalsTest, DaemonsThatCannotHaveTheirDevicesSayWhy) {
  const std::string lane = FakeMachine::LaneFlag();
  EXPECT_THAT(RefusedStart({"--devices=cuda:3", lane}),
              AllOf(HasSubstr("--devices=cuda:3"), HasSubstr("no device cuda:2"),
                    HasSubstr("this machine has 2")));
  EXPECT_THAT(RefusedStart({"--devices=cuda:1"}),
              AllOf(HasSubstr("--device=cuda:0"), HasSubstr("built without CUDA")));
  {
    Environment old;
    old.Set("FAKE_CUDA_VERSION", "12040");
    EXPECT_THAT(RefusedStart({"--devices=cuda:1", lane}),
                AllOf(HasSubstr("speaks CUDA 12.4"), HasSubstr("older than needed")));
  }
  {
    Environment twice;
    twice.Set("CUDA_VISIBLE_DEVICES", "1,1");
    EXPECT_THAT(RefusedStart({"--devices=cuda:2", lane}),
                AllOf(HasSubstr("lanes 0 and 1"), HasSubstr(FakeMachine::Uuid(1))));
  }
  {
    Environment none;
    none.Set("LD_LIBRARY_PATH", "");
    EXPECT_THAT(RefusedStart({"--devices=cuda:1", lane}), HasSubstr("no CUDA driver"));
  }
}

TEST_F(GpuRefusalsTest, AGroupsDaemonWithoutItsLibrarySaysWhatToInstall) {
  const std::string coordinator = FreeAddress();
  std::vector<std::string> flags = GroupFlags(0, 2, coordinator);
  flags.insert(flags.end(), {"--devices=cuda:1", FakeMachine::LaneFlag()});
  Environment old;
  old.Set("FAKE_NCCL_VERSION", "21805");
  EXPECT_THAT(RefusedStart(flags),
              AllOf(HasSubstr("is NCCL 2.18.5"), HasSubstr("NCCL 2.28 or newer"),
                    HasSubstr("install libnccl2")));
  // One that is alone needs none.
  StartDaemon("cuda:1");
}

TEST_F(GpuRefusalsTest, ADeviceHasTheLaneOfOneDaemon) {
  StartDaemon("cuda:0,1");
  EXPECT_THAT(RefusedStart({"--devices=cuda:1,0", FakeMachine::LaneFlag()}),
              AllOf(HasSubstr("cuda:1 (Fake GPU), " + FakeMachine::Uuid(1)),
                    HasSubstr(absl::StrCat("another daemon's (pid ", daemon_->pid(), ")"))));
  EXPECT_EQ(daemon_->Stop(), 0);
  StartDaemon("cuda:1,0");
}

TEST_F(GpuRefusalsTest, TrainersThatNoLaneCouldReachAreRefused) {
  StartDaemon("cuda:1");
  {
    RawTrainer on_the_processor(daemon_->address());
    ExpectRefused(Open(on_the_processor, ""),
                  {StatusCode::kInvalidArgument, "DEVICE_UNKNOWN", {"rank 0", "no GPU"}});
  }
  {
    RawTrainer stranger(daemon_->address());
    ExpectRefused(Open(stranger, "GPU-1"), {StatusCode::kInvalidArgument,
                                            "DEVICE_UNKNOWN",
                                            {"rank 0", "GPU-1", FakeMachine::Uuid(0)}});
  }
  // A trainer's device need not have a lane.
  RawTrainer beside(daemon_->address());
  EXPECT_TRUE(Open(beside, FakeMachine::Uuid(1)).ok());
}

TEST_F(GpuRefusalsTest, HandlesThatCannotBeAreRefused) {
  StartDaemon("cuda:1");
  RawTrainer trainer(daemon_->address());
  ASSERT_TRUE(Open(trainer, FakeMachine::Uuid(0)).ok());
  ASSERT_TRUE(trainer.Register().ok());
  const auto expect = [&](const auto& change, const std::vector<std::string>& names) {
    v1::AttachBuffersRequest request = trainer.AttachRequest();
    v1::Arena& arena = *request.mutable_arenas(0);
    v1::Arena::CudaIpc& ipc = *arena.mutable_cuda_ipc();
    ipc.set_handle(std::string(64, 'h'));
    ipc.set_device_uuid(FakeMachine::Uuid(0));
    ipc.set_base_offset(64);
    ipc.set_allocation_bytes(64 + arena.size_bytes());
    change(ipc);
    ExpectRefused(Attach(trainer, request), {StatusCode::kInvalidArgument, "ARENA_INVALID", names});
  };
  expect([](auto& ipc) { ipc.set_handle("short"); }, {"arena 1", "rank 0", "64 bytes", "5"});
  expect([](auto& ipc) { ipc.set_device_uuid("GPU-1"); }, {"arena 1", "rank 0", "GPU-1"});
  expect([](auto& ipc) { ipc.set_base_offset(72); }, {"arena 1", "byte 72", "multiple of 16"});
  expect([](auto& ipc) { ipc.set_base_offset(80); }, {"arena 1", "byte 80", "576"});
  expect([](auto& ipc) { ipc.set_base_offset(~uint64_t{15}); }, {"arena 1", "576"});
  expect([](auto& ipc) { ipc.set_device_uuid(FakeMachine::Uuid(1)); },
         {"arena 1", "rank 0", FakeMachine::Uuid(1), FakeMachine::Uuid(0)});
  // The daemon cannot open a handle: a lane finds that this is none.
  expect([](auto& /*ipc*/) {}, {"lane 0", "rank 0", "cannot be opened"});
}

TEST_F(GpuRefusalsTest, MemoryIsCountedInGranulesOfTheDevice) {
  // State takes one, of 2 MiB; staging would be the second.
  StartDaemon("cuda:1", {"--job_memory_bytes=3145728"});
  RawTrainer trainer(daemon_->address());
  ASSERT_TRUE(Open(trainer, FakeMachine::Uuid(0)).ok());
  absl::Status status = trainer.Register();
  if (status.ok()) status = Attach(trainer, trainer.AttachRequest());
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("2097152 bytes wanted"), HasSubstr("of at most 3145728")));
  daemon_.reset();
  // And so the plan counts them, before any is made.
  StartDaemon("cuda:1", {"--lane_memory_bytes=4194303"});
  RawTrainer again(daemon_->address());
  ASSERT_TRUE(Open(again, FakeMachine::Uuid(0)).ok());
  EXPECT_THAT(std::string(again.Register().message()),
              AllOf(HasSubstr("memory limit"), HasSubstr("4194303")));
}

TEST_F(GpuRefusalsTest, MemoryThatIsNotThereIsNamedWithItsDevice) {
  machine_.Set("FAKE_CUDA_MEMORY_MIB", "8");
  StartDaemon("cuda:2");
  RawTrainer trainer(daemon_->address());
  ASSERT_TRUE(Open(trainer, FakeMachine::Uuid(1)).ok());
  ASSERT_TRUE(trainer.Register().ok());
  v1::AttachBuffersRequest request = trainer.AttachRequest();
  request.mutable_arenas(0)->set_size_bytes(6291456);
  // State and staging are there already, a granule each.
  const absl::Status status = Attach(trainer, request);
  ExpectRefused(status, {StatusCode::kResourceExhausted, "MEMORY_EXHAUSTED", {"6291456"}});
  EXPECT_THAT(
      std::string(status.message()),
      AllOf(HasSubstr("rank0:arena1"), HasSubstr("cuda:1 (Fake GPU) has 4194304 of 8388608")));
}

// What waits for a driver that hangs fails with the device's name; the daemon lives.
class HangingDriverTest : public GpuRefusalsTest {
 protected:
  void SetUp() override {
    driver_ = std::make_unique<DiskDriver>(
        absl::StrCat("/tmp/dmuond-driver-", ::getpid()),
        [this](pid_t, const std::string&) { return --answers_ < 0 ? "hold" : "go"; },
        "cuda.create");
    StartDaemon("cuda:1", {"--lane_timeout=1s"});
    trainer_ = std::make_unique<RawTrainer>(daemon_->address());
    ASSERT_TRUE(Open(*trainer_, FakeMachine::Uuid(0)).ok());
  }
  void TearDown() override {
    GpuRefusalsTest::TearDown();
    daemon_.reset();
    driver_.reset();
    fs::remove(absl::StrCat("/tmp/dmuond-driver-", ::getpid()));
  }
  static void ExpectHangs(const absl::Status& status) {
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("cuda:0 (Fake GPU)"), HasSubstr("has not answered for 1000 ms")));
  }

  std::atomic<int> answers_ = 0;  // that the driver has yet to give before it hangs
  std::unique_ptr<DiskDriver> driver_;
  std::unique_ptr<RawTrainer> trainer_;
};

TEST_F(HangingDriverTest, AJobFailsAndTheNextOneBeginsWhenTheDriverIsWell) {
  absl::Status status = trainer_->Register();
  if (status.ok()) status = Attach(*trainer_, trainer_->AttachRequest());
  ExpectHangs(status);
  EXPECT_TRUE(daemon_->WaitServing("live", kEndsWithin).ok());
  answers_ = 1000;
  driver_->Release();
  // The call that hung may take a moment to come back.
  const auto give_up = std::chrono::steady_clock::now() + kEndsWithin;
  do {
    status = trainer_->Register();
  } while (!status.ok() && std::chrono::steady_clock::now() < give_up);
  ASSERT_TRUE(status.ok()) << status;
  status = Attach(*trainer_, trainer_->AttachRequest());
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(HangingDriverTest, ATrainersArenasFailAndTheDaemonLeavesInPeace) {
  answers_ = 2;  // state and staging of the lane
  ASSERT_TRUE(trainer_->Register().ok());
  const absl::Status status = Attach(*trainer_, trainer_->AttachRequest());
  ExpectRefused(status, {StatusCode::kDeadlineExceeded, "DEVICE_HANGS", {"512", "1000"}});
  ExpectHangs(status);
  EXPECT_EQ(daemon_->Stop(), 0);
}

TEST_F(GpuRefusalsTest, DaemonsOfOneGroupHaveOneTypeOfDevices) {
  const std::string coordinator = FreeAddress();
  auto cpu = DaemonProcess::Start({.flags = GroupFlags(0, 2, coordinator), .wait_for = "live"});
  ASSERT_TRUE(cpu.ok()) << cpu.status();
  std::vector<std::string> flags = GroupFlags(1, 2, coordinator);
  flags.push_back(FakeMachine::LaneFlag());
  auto gpu = DaemonProcess::Start({.devices = "cuda:1", .flags = flags, .wait_for = "live"});
  ASSERT_TRUE(gpu.ok()) << gpu.status();
  EXPECT_TRUE((*gpu)->WaitLogged("has device type cuda")) << (*gpu)->Log();
  EXPECT_THAT((*gpu)->Log(), HasSubstr("has cpu"));
}

}  // namespace
}  // namespace dmuond::testing
