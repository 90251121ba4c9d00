// A daemon as node 1 of two, whose coordinator is the test.
#ifndef DMUOND_TESTS_SERVER_DAEMON_MEMBER_FIXTURE_H_
#define DMUOND_TESTS_SERVER_DAEMON_MEMBER_FIXTURE_H_

#include <cstdint>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "dmuond/v1/peer.pb.h"
#include "gtest/gtest.h"
#include "tests/scheduler/job/registrations.h"
#include "tests/server/daemon/links_of_a_member.h"
#include "tests/server/daemon/sessions_fixture.h"

namespace dmuond::server {

// Node 1 of two. What the coordinator says the test says; jobs have one rank.
class MemberTest : public SessionsTest {
 protected:
  void Join(DaemonOptions& options) override {
    options.node = 1;
    options.nodes = 2;
    options.rail_address = "127.0.0.1";
  }
  PeerLinks* Links() override { return &links_; }

  // Of a job whose rank is of node 0.
  v1::PlanInputs PlanOf(const std::string& job) {
    v1::PlanInputs plan;
    plan.set_job(job);
    plan.set_job_incarnation(++job_incarnations_);
    plan.set_nodes(2);
    plan.set_lanes_per_node(2);
    *plan.add_registrations() = scheduler::OfOneMatrix(0, 1);
    return plan;
  }
  void HearPlan(const std::string& job, int times = 1) {
    v1::CoordinatorMessage message;
    *message.mutable_plan() = PlanOf(job);
    for (int i = 0; i < times; ++i) daemon_->OnCoordinatorMessage(message);
  }
  void HearRollBack(const std::string& job) {
    v1::CoordinatorMessage message;
    message.mutable_roll_back()->set_epoch(daemon_->newest_epoch());
    *message.mutable_roll_back()->mutable_plan() = PlanOf(job);
    daemon_->OnCoordinatorMessage(message);
  }
  void HearJobEnded(const std::string& job) {
    v1::CoordinatorMessage message;
    message.mutable_job_ended()->set_job(job);
    message.mutable_job_ended()->set_why("every rank has left");
    daemon_->OnCoordinatorMessage(message);
  }
  // Returns when the coordinator has it. Its answer comes before the thread ends.
  std::jthread Register(InProcessTrainer& trainer, absl::Status& answer) {
    std::jthread thread([&] { answer = trainer.Register(); });
    EXPECT_TRUE(links_.Next(&v1::MemberMessage::has_registration).has_value());
    return thread;
  }
  void ExpectPrepared(const std::string& job) {
    const v1::JobStatus status = daemon_->place(0).admin.Status().job();
    EXPECT_EQ(status.name(), job);
    EXPECT_EQ(status.state(), "preparing");
  }

  LinksOfAMember links_;
  uint64_t job_incarnations_ = 0;
};

}  // namespace dmuond::server

#endif  // DMUOND_TESTS_SERVER_DAEMON_MEMBER_FIXTURE_H_
