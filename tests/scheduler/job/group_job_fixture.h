// A GroupJob with the little that surrounds it, and a job on one node for tests to begin with.
#ifndef DMUOND_TESTS_SCHEDULER_JOB_GROUP_JOB_FIXTURE_H_
#define DMUOND_TESTS_SCHEDULER_JOB_GROUP_JOB_FIXTURE_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/job/group_job.h"
#include "scheduler/job/planned_job.h"
#include "tests/scheduler/job/registrations.h"

namespace dmuond::scheduler {

// Plans at once what the machine orders, or when a test says so; what is told in between is
// returned together.
class PlannedGroupJob {
 public:
  explicit PlannedGroupJob(GroupJobOptions options) : job_(std::move(options)) {}

  AddressedMessages OnFormed(TimePoint now, uint32_t epoch) {
    return Perform(now, job_.OnFormed(now, epoch));
  }
  AddressedMessages OnMessage(TimePoint now, int32_t from, const v1::MemberMessage& message) {
    return Perform(now, job_.OnMessage(now, from, message));
  }
  AddressedMessages OnMemberGone(TimePoint now, int32_t node, const std::string& why) {
    return Perform(now, job_.OnMemberGone(now, node, why));
  }
  AddressedMessages OnTick(TimePoint now) { return Perform(now, job_.OnTick(now)); }
  [[nodiscard]] uint32_t epoch() const { return job_.epoch(); }
  // Messages that changed nothing for their epoch or attempt, since it was asked last.
  std::vector<Dropped> TakeDropped() { return std::exchange(dropped_, {}); }

  // From now on the newest order waits for Plan().
  void HoldPlans() { holds_ = true; }
  [[nodiscard]] const std::optional<PlanOrder>& held() const { return held_; }
  AddressedMessages Plan(TimePoint now, const PlanOrder& order) {
    return Answer(now, order, MakePlannedJob(*order.inputs));
  }
  AddressedMessages Answer(TimePoint now, const PlanOrder& order, absl::StatusOr<PlannedJob> made) {
    return Perform(now, job_.OnPlanMade(now, order, std::move(made)));
  }

 private:
  AddressedMessages Perform(TimePoint now, GroupActions actions) {
    std::move(actions.dropped.begin(), actions.dropped.end(), std::back_inserter(dropped_));
    if (actions.plans.empty()) return std::move(actions.messages);
    if (holds_) {
      held_ = std::move(actions.plans.front());
      return std::move(actions.messages);
    }
    AddressedMessages more = Plan(now, actions.plans.front());
    std::move(more.begin(), more.end(), std::back_inserter(actions.messages));
    return std::move(actions.messages);
  }

  GroupJob job_;
  bool holds_ = false;
  std::vector<Dropped> dropped_;
  std::optional<PlanOrder> held_;
};

// A group of one node that has formed, and the ranks of the job "job" on it, which hold one matrix.
class OneNodeJobTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kEpoch = 5;

  OneNodeJobTest(int32_t ranks, GroupJobOptions options)
      : ranks_(ranks), coordinator_(std::move(options)) {
    EXPECT_TRUE(coordinator_.OnFormed(now_, kEpoch).empty());
    v1::MemberMessage state;
    state.mutable_member_state()->set_epoch(kEpoch);
    EXPECT_TRUE(Tell(state).empty());
  }

  AddressedMessages Tell(const v1::MemberMessage& message) {
    return coordinator_.OnMessage(now_, 0, message);
  }
  AddressedMessages Open(int32_t rank, int64_t restore_step = 0, uint64_t incarnation = 0) {
    return OpenFrom(rank, restore_step > 0 ? SnapshotOf(restore_step) : v1::SnapshotId(),
                    incarnation);
  }
  AddressedMessages OpenFrom(int32_t rank, const v1::SnapshotId& restore,
                             uint64_t incarnation = 0) {
    v1::MemberMessage message;
    v1::RankSession& session = *message.mutable_rank_session();
    session.set_rank(rank);
    session.set_job("job");
    session.set_world_size(ranks_);
    if (restore.step() > 0) *session.mutable_restore() = restore;
    session.set_incarnation(incarnation);
    session.set_pid(4700 + rank);
    return Tell(message);
  }
  AddressedMessages Register(int32_t rank) {
    v1::MemberMessage message;
    *message.mutable_registration() = OfOneMatrix(rank, ranks_);
    return Tell(message);
  }
  // All ranks register, and the node is told to prepare.
  void Plan(int64_t restore_step = 0, uint64_t incarnation = 0) {
    for (int32_t rank = 0; rank < ranks_; ++rank) {
      EXPECT_TRUE(Open(rank, restore_step, incarnation).empty());
    }
    AddressedMessages told;
    for (int32_t rank = 0; rank < ranks_; ++rank) told = Register(rank);
    TakePlan(told);
  }
  void TakePlan(const AddressedMessages& told) {
    ASSERT_EQ(told.size(), 1U);
    plan_ = *MakePlannedJob(told[0].message.plan())->plan;
  }
  AddressedMessages LanesReady() {
    return Tell(scheduler::LanesReady(plan_.digest, coordinator_.epoch()));
  }
  AddressedMessages LoseALane() { return Tell(LaneLost(coordinator_.epoch())); }
  static v1::MemberMessage Attached(int32_t rank, uint32_t epoch, uint64_t incarnation = 0) {
    v1::MemberMessage message;
    message.mutable_rank_attached()->set_rank(rank);
    message.mutable_rank_attached()->set_epoch(epoch);
    message.mutable_rank_attached()->set_incarnation(incarnation);
    return message;
  }
  AddressedMessages Attach(int32_t rank) { return Tell(Attached(rank, coordinator_.epoch())); }
  AddressedMessages Gone(int32_t rank, const std::string& detail) {
    v1::MemberMessage message;
    message.mutable_rank_gone()->set_rank(rank);
    message.mutable_rank_gone()->set_detail(detail);
    return Tell(message);
  }

  const int32_t ranks_;
  TimePoint now_;
  PlannedGroupJob coordinator_;
  scheduler::Plan plan_;
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_TESTS_SCHEDULER_JOB_GROUP_JOB_FIXTURE_H_
