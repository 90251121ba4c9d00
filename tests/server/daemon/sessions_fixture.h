// A daemon of the test's own process, without any service before it: trainers call it from threads
// of their own. What the thread sanitizer is to see, so nothing here links gRPC; lanes are real
// processes.
#ifndef DMUOND_TESTS_SERVER_DAEMON_SESSIONS_FIXTURE_H_
#define DMUOND_TESTS_SERVER_DAEMON_SESSIONS_FIXTURE_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "dmuond/wire/socket_path.h"
#include "gtest/gtest.h"
#include "server/daemon/calls/attach_server.h"
#include "server/daemon/daemon.h"
#include "tests/server/daemon/held_device.h"
#include "tests/server/daemon/in_process_trainer.h"
#include "tests/server/daemon/support.h"

namespace dmuond::server {

class SessionsTest : public ::testing::Test {
 protected:
  static constexpr int64_t kJobMemoryBytes = int64_t{10} << 20;

  void SetUp() override {
    DaemonOptions options;
    options.lanes = 2;
    options.socket = socket_;
    options.job_memory_bytes = kJobMemoryBytes;
    options.lane_binary =
        LaneBinary(std::filesystem::read_symlink("/proc/self/exe").parent_path() / "dmuond-lane");
    options.coordinator.lanes_per_node = options.lanes;
    Join(options);
    daemon_ = std::make_unique<Daemon>(std::move(options), device_);
    auto attach = AttachServer::Start({.path = socket_ + wire::kAttachSuffix},
                                      {.on_gone = [this](AttachId id) { OnGone(id); }});
    ASSERT_TRUE(attach.ok()) << attach.status();
    attach_ = *std::move(attach);
    daemon_->Bind(attach_.get(), Links());
    daemon_->OnFormed(1);
    ticker_ = std::jthread([this](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        daemon_->Tick();
        std::this_thread::sleep_for(std::chrono::milliseconds(10));  // a clock's tick, no wait
      }
    });
  }
  void TearDown() override {
    EXPECT_TRUE(daemon_->node().PrepareToLeave(kPatience).ok());
    EXPECT_TRUE(daemon_->node().Leave());
    ticker_ = {};
    attach_.reset();
    daemon_.reset();
  }

  // Alone, where a test does not say otherwise.
  virtual void Join(DaemonOptions& /*options*/) {}
  virtual PeerLinks* Links() { return nullptr; }
  virtual void OnGone(AttachId id) { daemon_->OnAttachGone(id); }

  std::unique_ptr<InProcessTrainer> NewTrainer() {
    return std::make_unique<InProcessTrainer>(*daemon_, socket_);
  }
  // Somebody who looks at everything until the test's end.
  [[nodiscard]] std::jthread Looker() {
    return std::jthread([this](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        looked_ += daemon_->place(0).admin.Status().lanes_size() +
                   (daemon_->place(0).admin.Plan().ok() ? 1 : 0) +
                   (daemon_->place(0).admin.Routing().ok() ? 1 : 0);
      }
    });
  }
  // Of the job that runs.
  void StepsOf(InProcessTrainer& trainer, int64_t first, int64_t last) {
    for (int64_t step = first; step <= last; ++step) {
      const absl::Status done = trainer.Step(step);
      ASSERT_TRUE(done.ok()) << done;
    }
  }
  // A fresh trainer gets the whole daemon, as soon as what was there before has ended.
  void ExpectUsable() {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    std::unique_ptr<InProcessTrainer> trainer;
    absl::Status begun;
    do {
      trainer = NewTrainer();
      begun = trainer->Begin(0, 1);
    } while (!begun.ok() && std::chrono::steady_clock::now() < deadline);
    ASSERT_TRUE(begun.ok()) << begun;
    StepsOf(*trainer, 1, 2);
    const v1::GetStatusReply status = daemon_->place(0).admin.Status();
    EXPECT_EQ(status.job().trainers_size(), 1);
    EXPECT_TRUE(trainer->Close().ok());
  }

  TempDir dir_;
  std::string socket_ = dir_ / "d.sock";
  HeldDevice device_;
  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<AttachServer> attach_;
  std::jthread ticker_;
  std::atomic<int64_t> looked_ = 0;
};

}  // namespace dmuond::server

#endif  // DMUOND_TESTS_SERVER_DAEMON_SESSIONS_FIXTURE_H_
