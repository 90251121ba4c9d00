// The parts of one lane by themselves: all of a job on one node, the test in the place of the
// engine that calls them and of the daemon that decides.
#ifndef DMUOND_TESTS_SERVER_LANE_ONE_LANE_H_
#define DMUOND_TESTS_SERVER_LANE_ONE_LANE_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/cpu_memory.h"
#include "scheduler/convert/convert.h"
#include "server/lane/collector.h"
#include "server/lane/extract_check.h"
#include "server/lane/publisher.h"
#include "server/lane/rail.h"
#include "server/lane/slots.h"
#include "server/lane/updater.h"
#include "server/shared/publish_board.h"
#include "tests/scheduler/layouts.h"
#include "tests/server/lane/values.h"

namespace dmuond::server::lane::testing {

class OneLane {
 public:
  static constexpr int64_t kArenaBytes = 1 << 20;

  // Attaches all of the world's ranks. The test fails if a part cannot be made.
  explicit OneLane(const scheduler::testing::World& world) { Make(world); }

  // Opens an attempt, in which every trainer is through at once.
  void Arm(uint64_t attempt, scheduler::AttemptKind kind) {
    scheduler::Submission submission;
    submission.scalars.groups.push_back({.learning_rate = 0.1, .beta1 = 0.9, .beta2 = 0.9});
    decision.verdict = scheduler::Verdict::kCommit;
    decision.scalars = submission.scalars;
    submission.kind = decision.kind = kind;
    submission.attempt = decision.attempt = scheduler::Attempt(attempt);
    decision.step = scheduler::StepId(static_cast<int64_t>(attempt));
    collector->Arm(scheduler::Attempt(attempt));
    for (size_t rank = 0; rank < pages.size(); ++rank) {
      const wire::TimelinePage page(pages[rank].data());
      for (int32_t b = 0; b < buckets; ++b) wire::Advance(page.ready(b), attempt);
      wire::Advance(page.submitted(), attempt);
      submission.rank = scheduler::TrainerRank(static_cast<int32_t>(rank));
      collector->OnSubmission(submission);
    }
  }
  void StartUpdate() {
    updater->Start(decision);
    publisher->Start({.attempt = decision.attempt, .submitted_first = true});
  }
  // False: something has failed.
  bool Collect() {
    bool ok = true;
    while (ok && !collector->complete()) ok = collector->Progress().ok();
    return ok;
  }
  bool UpdateBatch() {
    auto batch = updater->RunBatch();
    if (batch.ok()) publisher->OnBatch(**batch);
    return batch.ok();
  }
  bool Publish() {
    bool ok = true;
    while (ok && publisher->running()) {
      if (!updater->done()) ok = UpdateBatch();
      ok = ok && publisher->Progress().ok();
    }
    return ok;
  }

  [[nodiscard]] ExtractCheck MakeCheck() { return {*job, *slots_, *trainers_, *device_, *stream_}; }

  int32_t buckets = 0;
  std::unique_ptr<LaneJob> job;
  std::vector<HostMemory> pages;   // timelines, by rank
  std::vector<HostMemory> arenas;  // two for each rank
  scheduler::Decision decision;
  std::unique_ptr<Collector> collector;
  std::unique_ptr<Updater> updater;
  std::unique_ptr<Publisher> publisher;

 private:
  void Make(const scheduler::testing::World& world) {
    v1::PlanInputs wire;
    for (const scheduler::Registration& registration : world.registrations) {
      v1::Registration& to = *wire.add_registrations();
      to = ToProto(registration);
      to.set_world_size(static_cast<int32_t>(world.registrations.size()));
      to.add_groups()->set_preset("keller");
    }
    wire.set_nodes(1);
    wire.set_lanes_per_node(1);
    auto inputs = FromProto(wire);
    ASSERT_TRUE(inputs.ok());
    auto plan = scheduler::MakePlan(*inputs);
    ASSERT_TRUE(plan.ok());
    buckets = plan->buckets;
    auto program = scheduler::MakeLaneProgram(*inputs, *plan, scheduler::LaneId(0));
    ASSERT_TRUE(program.ok());
    v1::LaneCommand::Configure configure;
    *configure.mutable_program() = ToProto(*program);
    configure.add_groups()->set_preset("keller");
    configure.set_state_bytes(program->state_bytes);
    configure.set_staging_bytes(program->staging_bytes);
    configure.set_state_table_bytes(static_cast<int64_t>(StateTableBytes(plan->units.size())));
    configure.set_publish_board_bytes(static_cast<int64_t>(PublishBoardBytes(buckets, 1)));
    kernels::cpu::CpuMemoryHolder holder;
    std::vector<wire::UniqueFd> fds;
    for (const int64_t bytes : {configure.state_bytes(), configure.staging_bytes(),
                                configure.state_table_bytes(), configure.publish_board_bytes()}) {
      fds.push_back(*holder.Allocate(bytes, "test"));
    }
    device_ = *kernels::cpu::CpuDevice::Create(1);
    auto made = LaneJob::Make(configure, fds, *device_);
    ASSERT_TRUE(made.ok()) << made.status();
    job = *std::move(made);
    rail_ = std::make_unique<Rail>(*job, channel_, nullptr);
    stream_ = *device_->CreateStream();
    trainers_ = std::make_unique<TrainerMemory>(*job, *device_);
    for (size_t rank = 0; rank < world.registrations.size(); ++rank) {
      Attach(static_cast<int32_t>(rank));
    }
    slots_ = *Slots::Create(*job);
    collector = *Collector::Create(*job, *trainers_, *rail_, *device_, *stream_);
    updater = *Updater::Create(*job, *slots_, *device_, *stream_);
    publisher = *Publisher::Create(*job, *trainers_, *rail_, *device_);
  }

  void Attach(int32_t rank) {
    v1::LaneCommand::AttachTrainer attach;
    attach.set_rank(rank);
    attach.set_incarnation(1);
    attach.set_buckets(buckets);
    attach.set_timeline_bytes(static_cast<int64_t>(wire::TimelineBytes(buckets)));
    std::vector<wire::UniqueFd> fds;
    for (const uint32_t id : {0, 1}) {
      auto& arena = *attach.add_arenas();
      arena.set_id(id);
      arena.set_size_bytes(kArenaBytes);
      arenas.emplace_back(kArenaBytes);
      fds.emplace_back(::dup(arenas.back().fd()));
    }
    pages.emplace_back(wire::TimelineBytes(buckets));
    fds.emplace_back(::dup(pages.back().fd()));
    ASSERT_TRUE(trainers_->Attach(attach, fds).ok());
  }

  std::unique_ptr<kernels::Device> device_;
  Channel channel_{wire::UniqueFd()};  // one node: the rail never reports
  std::unique_ptr<Rail> rail_;
  std::unique_ptr<kernels::Stream> stream_;
  std::unique_ptr<TrainerMemory> trainers_;
  std::unique_ptr<Slots> slots_;
};

}  // namespace dmuond::server::lane::testing

#endif  // DMUOND_TESTS_SERVER_LANE_ONE_LANE_H_
