// One rank's job on one node, for tests to begin with.
#ifndef DMUOND_TESTS_SCHEDULER_JOB_NODE_JOB_FIXTURE_H_
#define DMUOND_TESTS_SCHEDULER_JOB_NODE_JOB_FIXTURE_H_

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "scheduler/convert/convert.h"
#include "scheduler/job/node_job.h"
#include "tests/scheduler/job/registrations.h"

namespace dmuond::scheduler {

// One rank's job on a node with two lanes, which is alone; performers do at once what they are
// told, or not at all.
class NodeJobFixture : public ::testing::Test {
 protected:
  static constexpr uint32_t kEpoch = 3;
  static inline const NodeJobOptions kOptions{.lanes = 2, .snapshots = true};

  // `hands_over`: after each event another NodeJob goes on, which is made from the record.
  explicit NodeJobFixture(bool hands_over) : hands_over_(hands_over) {
    Perform(job_.OnFormed(now_, kEpoch));
  }

  [[nodiscard]] JobRecord Record() const {
    std::string bytes;
    for (const RecordPart& part : job_.RecordParts()) {
      JobRecord alone;
      job_.WritePart(part, alone);
      bytes += alone.SerializeAsString();
    }
    return *ParseJobRecord(bytes);
  }
  void HandOver() {
    const JobRecord record = Record();
    absl::StatusOr<NodeJob> successor = NodeJob::FromRecord(
        kOptions, record, record.progress().prepared() ? *MakePlannedJob(Inputs(0)) : PlannedJob{},
        now_);
    ASSERT_TRUE(successor.ok()) << successor.status();
    std::destroy_at(&job_);
    std::construct_at(&job_, *std::move(successor));
    EXPECT_EQ(Record().DebugString(), record.DebugString());
  }

  // Keeps everything, and starts lanes.
  void Perform(node::Actions actions) {
    if (hands_over_) HandOver();
    for (node::Action& action : actions) {
      const bool starts = std::holds_alternative<node::StartLanes>(action);
      done_.push_back(std::move(action));
      if (starts) Perform(job_.OnLanesStarted(now_, absl::OkStatus()));
    }
  }
  template <typename Order>
  std::vector<Order> Taken() const {
    std::vector<Order> of_kind;
    for (const node::Action& action : done_) {
      if (const auto* one = std::get_if<Order>(&action)) of_kind.push_back(*one);
    }
    return of_kind;
  }
  // The last that the coordinator was told of a kind.
  v1::MemberMessage LastTold(bool (v1::MemberMessage::*of_kind)() const) const {
    v1::MemberMessage last;
    for (const auto& told : Taken<node::TellCoordinator>()) {
      if ((told.message.*of_kind)()) last = told.message;
    }
    return last;
  }

  uint64_t Open(bool end_is_seen = true) {
    NodeJob::Opening opening;
    opening.id = ++sessions_;
    opening.end_is_seen = end_is_seen;
    opening.world_size = 1;
    opening.job = "job";
    opening.resume = v1::OpenSessionRequest::RESUME_IF_PRESENT;
    node::Actions actions;
    const auto answer = job_.Open(now_, opening, {std::optional<ResumePoint>()}, actions);
    EXPECT_TRUE(std::holds_alternative<NodeJob::Opened>(answer));
    Perform(std::move(actions));
    return opening.id;
  }
  void Register(uint64_t id) {
    const v1::Registration registration = OfOneMatrix(0, 1);
    Perform(job_.Register(id, registration,
                          std::make_shared<const Registration>(*FromProto(registration))));
  }
  v1::PlanInputs Inputs(int64_t restore_step) {
    v1::PlanInputs inputs;
    inputs.set_job("job");
    inputs.set_job_incarnation(7);
    inputs.set_nodes(1);
    inputs.set_lanes_per_node(2);
    if (restore_step > 0) *inputs.mutable_restore() = SnapshotOf(restore_step);
    *inputs.add_registrations() = OfOneMatrix(0, 1);
    return inputs;
  }
  void Hear(v1::CoordinatorMessage message) { Perform(job_.OnMessage(now_, message)); }
  void Plan(int64_t restore_step = 0) {
    v1::CoordinatorMessage message;
    *message.mutable_plan() = Inputs(restore_step);
    Hear(message);
  }
  void Prepared() {
    Perform(job_.OnPrepared(now_, NodeJob::Prepared{*MakePlannedJob(Inputs(0)), true}));
  }
  void LanesReady() {
    for (int32_t i = 0; i < 2; ++i) {
      v1::LaneReport report;
      report.mutable_ready()->set_device("a cpu");
      Perform(job_.OnLaneReport(now_, LaneIndex(i), report));
    }
  }
  // The snapshot of a step comes into the lanes.
  void RestoreFrom(int64_t step) {
    NodeJob::Restored restored;
    restored.from.manifest.set_step(step);
    restored.updates.resize(2);
    Perform(job_.OnRestored(now_, restored));
    for (int32_t i = 0; i < 2; ++i) {
      v1::LaneReport loaded;
      loaded.mutable_state_loaded();
      Perform(job_.OnLaneReport(now_, LaneIndex(i), loaded));
    }
  }
  void OpenAttempt(uint32_t counter, int64_t step) {
    v1::CoordinatorMessage message;
    message.mutable_open()->set_attempt(MakeAttempt(GroupEpoch(job_.epoch()), counter).value());
    message.mutable_open()->set_step(step);
    Hear(message);
  }
  // Both lanes have the gradients of an attempt: the node votes.
  void Gather(uint32_t counter) {
    for (int32_t i = 0; i < 2; ++i) {
      v1::LaneReport report;
      report.mutable_gathered()->set_attempt(
          MakeAttempt(GroupEpoch(job_.epoch()), counter).value());
      Perform(job_.OnLaneReport(now_, LaneIndex(i), report));
    }
  }
  // The attempt commits its step. Returns what its state is known by.
  SnapshotId Commit(uint32_t counter, int64_t step) {
    Gather(counter);
    Decision commit;
    commit.attempt = MakeAttempt(GroupEpoch(job_.epoch()), counter);
    commit.step = StepId(step);
    commit.verdict = Verdict::kCommit;
    v1::CoordinatorMessage decided;
    *decided.mutable_decision() = ToProto(commit);
    Hear(decided);
    return {commit.attempt, commit.step};
  }
  void Halt(int32_t leaver) {
    v1::CoordinatorMessage message;
    message.mutable_halted()->set_node(leaver);
    Hear(message);
  }
  void Reform(uint32_t epoch) {
    v1::CoordinatorMessage message;
    message.mutable_reform()->set_epoch(epoch);
    message.mutable_reform()->set_why("a lane died");
    Hear(message);
  }
  // With a session whose trainer can submit.
  uint64_t Run(bool own_memory = false, bool end_is_seen = true) {
    const uint64_t id = Open(end_is_seen);
    Register(id);
    Plan();
    Prepared();
    LanesReady();
    OpenAttempt(1, 1);
    Attach(id, own_memory);
    return id;
  }
  // `own_memory`: what it attaches is memory of the trainer's process.
  void Attach(uint64_t id, bool own_memory = false) {
    v1::LaneCommand command;
    if (own_memory) command.mutable_attach()->add_arenas()->mutable_cuda_ipc();
    command.mutable_attach()->set_rank(0);
    command.mutable_attach()->set_incarnation(job_.ranks().Find(id)->incarnation);
    Perform(job_.BeginMapping(id, command));
    MapEverywhere(id);
    Perform(job_.Attach(id, {}, false));
    job_.TellAttached(id);
  }
  // Whether the rank may come again, or is to wait.
  bool MayOpen() {
    NodeJob::Opening opening;
    opening.world_size = 1;
    opening.job = "job";
    opening.resume = v1::OpenSessionRequest::RESUME_IF_PRESENT;
    const auto why = job_.WhyNotOpen(opening, {});
    EXPECT_TRUE(!why.has_value() || std::holds_alternative<NodeJob::Later>(*why));
    return !why.has_value();
  }
  void Detached(int32_t lane, uint64_t incarnation) {
    v1::LaneReport report;
    report.mutable_detached()->set_rank(0);
    report.mutable_detached()->set_incarnation(incarnation);
    Perform(job_.OnLaneReport(now_, LaneIndex(lane), report));
  }
  void ExpectToComeAgainWhenUnmapped(uint64_t id) {
    const uint64_t incarnation = job_.ranks().Find(id)->incarnation;
    Perform(job_.OnTrainerGone(id, "it died"));
    EXPECT_EQ(Taken<node::CommandLanes>().back().command.detach().incarnation(), incarnation);
    EXPECT_TRUE(job_.ranks().attachments().empty());
    OpenAttempt(2, 1);
    EXPECT_TRUE(job_.Unmaps(0));
    Detached(0, incarnation);
    EXPECT_FALSE(MayOpen());
    Detached(1, incarnation - 1);  // an older session's
    EXPECT_FALSE(MayOpen());
    Detached(1, incarnation);
    EXPECT_FALSE(job_.Unmaps(0));
    EXPECT_TRUE(MayOpen());
  }
  void MapEverywhere(uint64_t id) {
    for (int32_t i = 0; i < 2; ++i) {
      v1::LaneReport report;
      report.mutable_attached()->set_rank(0);
      report.mutable_attached()->set_incarnation(job_.ranks().Find(id)->incarnation);
      Perform(job_.OnLaneReport(now_, LaneIndex(i), report));
    }
  }

  TimePoint now_{};
  const bool hands_over_;
  NodeJob job_{kOptions};
  std::vector<node::Action> done_;
  uint64_t sessions_ = 0;
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_TESTS_SCHEDULER_JOB_NODE_JOB_FIXTURE_H_
