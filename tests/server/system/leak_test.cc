// Hundreds of attached and detached trainers leave the daemon's and the lanes' descriptors,
// threads, mappings, shared memory and resident memory where they were.
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dmuond/client/session.h"
#include "gtest/gtest.h"
#include "tests/client/daemon_process.h"
#include "tests/sanitized.h"
#include "tests/server/system/daemon_status.h"

namespace dmuond::testing {
namespace {

using client::LayoutBuilder;
using client::Session;
namespace fs = std::filesystem;

constexpr int kCycles = 200;
constexpr std::chrono::seconds kSettlesWithin{20};
// A sanitizer keeps freed memory, and what it knows of it, for a while.
constexpr int64_t kSanitizersFactor = kSanitized ? 100 : 1;
// Allocators keep some of what they had; 200 sessions with 1 MiB of arenas each would show.
constexpr int64_t kResidentSlackKib = 4096 * kSanitizersFactor;
// gRPC's threads come and go, each with its stack and its guard page.
constexpr int64_t kThreadSlack = 4;
constexpr int64_t kMappingSlack = 4 * kThreadSlack * kSanitizersFactor;

// Of the process's descriptors, those of shared memory: it has no names.
int64_t Memfds(const fs::path& descriptors) {
  int64_t memfds = 0;
  std::error_code gone;
  for (const auto& entry : fs::directory_iterator(descriptors, gone)) {
    const fs::path target = fs::read_symlink(entry.path(), gone);
    memfds += !gone && target.string().starts_with("/memfd:") ? 1 : 0;
  }
  return memfds;
}

int64_t Entries(const fs::path& directory) {
  std::error_code gone;
  return std::distance(fs::directory_iterator(directory, gone), fs::directory_iterator());
}

struct Footprint {
  int64_t descriptors = 0;
  int64_t threads = 0;
  int64_t mappings = 0;
  int64_t resident_kib = 0;
  int64_t memfds = 0;

  static Footprint Of(pid_t pid) {
    const fs::path process = absl::StrCat("/proc/", pid);
    Footprint footprint;
    footprint.descriptors = Entries(process / "fd");
    footprint.threads = Entries(process / "task");
    std::ifstream maps(process / "maps");
    for (std::string line; std::getline(maps, line);) ++footprint.mappings;
    std::ifstream status(process / "status");
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("VmRSS:")) footprint.resident_kib = std::stoll(line.substr(6));
    }
    footprint.memfds = Memfds(process / "fd");
    return footprint;
  }
  // The larger one of each.
  static Footprint Max(const Footprint& a, const Footprint& b) {
    return {std::max(a.descriptors, b.descriptors), std::max(a.threads, b.threads),
            std::max(a.mappings, b.mappings), std::max(a.resident_kib, b.resident_kib),
            std::max(a.memfds, b.memfds)};
  }
  [[nodiscard]] bool Within(const Footprint& before) const {
    return descriptors <= before.descriptors && threads <= before.threads + kThreadSlack &&
           mappings <= before.mappings + kMappingSlack &&
           resident_kib <= before.resident_kib + kResidentSlackKib && memfds <= before.memfds;
  }
};
std::ostream& operator<<(std::ostream& out, const Footprint& footprint) {
  return out << footprint.descriptors << " descriptors, " << footprint.threads << " threads, "
             << footprint.mappings << " mappings, " << footprint.resident_kib << " KiB, "
             << footprint.memfds << " memfds";
}

client::Layout LargeMatrix(int32_t world) {
  LayoutBuilder builder(world);
  builder.AddGroup({.preset = "torch"});
  builder.Add({.name = "matrix", .shape = {256, 512}});  // two arenas of 512 KiB
  return *builder.Build();
}

class LeakTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto daemon = DaemonProcess::Start(
        {.devices = "cpu:2", .flags = {"--threads=1", "--session_linger=0", "--log_level=error"}});
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    status_ = std::make_unique<DaemonStatus>(daemon_->address());
  }
  // The most that a process had after each of the first cycles it has after `cycles` more; it may
  // take a moment to let go.
  void ExpectSteady(const std::vector<pid_t>& pids, int cycles,
                    const std::function<void(int)>& cycle) {
    std::vector<Footprint> before(pids.size());
    for (int i = 0; i < cycles / 10; ++i) {
      cycle(i);
      for (size_t p = 0; p < pids.size(); ++p) {
        before[p] = Footprint::Max(before[p], Footprint::Of(pids[p]));
      }
    }
    for (int i = 0; i < cycles && !HasFatalFailure(); ++i) cycle(i);
    const auto deadline = std::chrono::steady_clock::now() + kSettlesWithin;
    for (size_t p = 0; p < pids.size(); ++p) {
      Footprint after = Footprint::Of(pids[p]);
      while (!after.Within(before[p]) && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));  // between two looks
        after = Footprint::Of(pids[p]);
      }
      EXPECT_TRUE(after.Within(before[p])) << (p == 0 ? "the daemon" : "a lane")
                                           << "\nbefore: " << before[p] << "\nafter:  " << after;
      std::cout << (p == 0 ? "daemon" : "lane  ") << " before: " << before[p]
                << "; after: " << after << "\n";
    }
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<DaemonStatus> status_;
};

TEST_F(LeakTest, TrainersThatComeAndGoWithinAJobLeaveNothing) {
  auto stays = Session::Open({.address = daemon_->address(), .rank = 0, .world_size = 2});
  ASSERT_TRUE(stays.ok()) << stays.status();
  const auto come = [&] {
    auto session = Session::Open({.address = daemon_->address(), .rank = 1, .world_size = 2});
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? *std::move(session) : nullptr;
  };
  std::unique_ptr<Session> first = come();
  ASSERT_NE(first, nullptr);
  std::thread other([&] { EXPECT_TRUE(first->Register(LargeMatrix(2)).ok()); });
  ASSERT_TRUE((*stays)->Register(LargeMatrix(2)).ok());
  other.join();
  ASSERT_TRUE((*stays)->Attach().ok());
  EXPECT_TRUE(first->Close().ok());
  std::vector<pid_t> pids = {daemon_->pid()};
  const v1::GetStatusReply status = status_->Get();
  for (const v1::LaneStatus& lane : status.lanes()) pids.push_back(lane.pid());
  ASSERT_EQ(pids.size(), 3U);
  ExpectSteady(pids, kCycles, [&](int) {
    const std::unique_ptr<Session> session = come();
    ASSERT_NE(session, nullptr);
    const auto registered = session->Register(LargeMatrix(2));
    ASSERT_TRUE(registered.ok()) << registered.status();
    const absl::Status attached = session->Attach();
    ASSERT_TRUE(attached.ok()) << attached;
    ASSERT_TRUE(session->Close().ok());
  });
}

TEST_F(LeakTest, JobsThatCloseOrAreDroppedLeaveNothing) {
  ExpectSteady({daemon_->pid()}, kCycles, [&](int i) {
    {
      auto session = Session::Open({.address = daemon_->address()});
      ASSERT_TRUE(session.ok()) << session.status();
      ASSERT_TRUE((*session)->Register(LargeMatrix(1)).ok());
      ASSERT_TRUE((*session)->Attach().ok());
      std::ranges::fill((*session)->Weight<float>(0), 0.5F);
      ASSERT_TRUE((*session)->Push().ok());
      if (i % 2 == 0) {
        ASSERT_TRUE((*session)->Close().ok());
      }
    }
    ASSERT_TRUE(status_->WaitForNoJob());
  });
}

TEST_F(LeakTest, KilledTrainerProcessesLeaveNothing) {
  const auto kill_one = [&](const std::string& phase, const std::string& state) {
    auto trainer = ChildProcess::Start("phase_trainer", {daemon_->address(), "0", "1", phase});
    ASSERT_TRUE(trainer.ok()) << trainer.status();
    ASSERT_TRUE(status_->WaitForTrainer(0, state));
    trainer->reset();
    ASSERT_TRUE(status_->WaitForNoJob());
  };
  // Fewer cycles: each is three processes.
  ExpectSteady({daemon_->pid()}, 20, [&](int) {
    kill_one("open", "open");
    kill_one("registered", "registered");
    kill_one("pushed", "attached");
  });
}

}  // namespace
}  // namespace dmuond::testing
