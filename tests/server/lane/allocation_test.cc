// The engine does not allocate while it collects, updates and publishes. On one node: the CPU
// device's rail between nodes is Gloo's, which allocates for each message.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/cpu_memory.h"
#include "scheduler/convert/convert.h"
#include "server/lane/collector.h"
#include "server/lane/publisher.h"
#include "server/lane/rail.h"
#include "server/lane/slots.h"
#include "server/lane/updater.h"
#include "server/shared/publish_board.h"
#include "tests/scheduler/layouts.h"
#include "tests/server/lane/values.h"

namespace {
std::atomic<int64_t> allocations{0};
}  // namespace

void* operator new(size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  void* const memory = std::malloc(size);
  if (memory == nullptr) std::abort();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace dmuond::server::lane::testing {
namespace {

using scheduler::testing::AdamW;
using scheduler::testing::Muon;

TEST(AllocationTest, NothingIsAllocatedFromReadyToPublished) {
  scheduler::testing::World world(2, 1, 1);
  for (int i = 0; i < 4; ++i) world.Replicate(Muon("w" + std::to_string(i), {32, 16}));
  world.ShardRows(AdamW("e", {64, 8}));
  v1::PlanInputs wire;
  for (const scheduler::Registration& registration : world.registrations) {
    v1::Registration& to = *wire.add_registrations();
    to = ToProto(registration);
    to.set_world_size(2);
    to.add_groups()->set_preset("keller");
  }
  wire.set_nodes(1);
  wire.set_lanes_per_node(1);
  auto inputs = FromProto(wire);
  ASSERT_TRUE(inputs.ok());
  auto plan = scheduler::MakePlan(*inputs);
  ASSERT_TRUE(plan.ok());
  auto program = scheduler::MakeLaneProgram(*inputs, *plan, scheduler::LaneId(0));
  ASSERT_TRUE(program.ok());
  v1::LaneCommand::Configure configure;
  *configure.mutable_program() = ToProto(*program);
  configure.add_groups()->set_preset("keller");
  configure.set_state_bytes(program->state_bytes);
  configure.set_staging_bytes(program->staging_bytes);
  configure.set_state_table_bytes(static_cast<int64_t>(StateTableBytes(plan->units.size())));
  configure.set_publish_board_bytes(static_cast<int64_t>(PublishBoardBytes(plan->buckets, 1)));
  kernels::cpu::CpuMemoryHolder holder;
  const auto memory = [&](int64_t bytes) { return *holder.Allocate(bytes, "test"); };
  std::vector<wire::UniqueFd> fds;
  fds.push_back(memory(configure.state_bytes()));
  fds.push_back(memory(configure.staging_bytes()));
  fds.push_back(memory(configure.state_table_bytes()));
  fds.push_back(memory(configure.publish_board_bytes()));
  auto device = kernels::cpu::CpuDevice::Create(1);
  ASSERT_TRUE(device.ok());
  auto job = LaneJob::Make(configure, fds, **device);
  ASSERT_TRUE(job.ok()) << job.status();
  Channel channel{wire::UniqueFd()};  // one node: the rail never reports
  Rail rail(**job, channel, nullptr);
  auto stream = (*device)->CreateStream();
  ASSERT_TRUE(stream.ok());
  TrainerMemory trainers(**job, **device);
  std::vector<HostMemory> pages;
  const auto buckets = static_cast<uint32_t>(plan->buckets);
  for (int32_t rank : {0, 1}) {
    v1::LaneCommand::AttachTrainer attach;
    attach.set_rank(rank);
    attach.set_incarnation(1);
    attach.set_buckets(buckets);
    attach.set_timeline_bytes(static_cast<int64_t>(wire::TimelineBytes(buckets)));
    std::vector<wire::UniqueFd> arenas;
    for (uint32_t id : {0, 1}) {
      attach.add_arenas()->set_id(id);
      attach.mutable_arenas(static_cast<int>(id))->set_size_bytes(1 << 20);
      arenas.push_back(memory(1 << 20));
    }
    pages.emplace_back(wire::TimelineBytes(buckets));
    arenas.emplace_back(::dup(pages.back().fd()));
    ASSERT_TRUE(trainers.Attach(attach, arenas).ok());
  }
  auto slots = Slots::Create(**job);
  ASSERT_TRUE(slots.ok());
  auto collector = Collector::Create(**job, trainers, rail, **device, **stream);
  ASSERT_TRUE(collector.ok());
  auto updater = Updater::Create(**job, **slots, **device, **stream);
  ASSERT_TRUE(updater.ok());
  auto publishing = Publisher::Create(**job, trainers, rail, **device, **stream);
  ASSERT_TRUE(publishing.ok());
  Publisher& publisher = **publishing;

  scheduler::Submission submission;
  submission.scalars.groups.push_back({.learning_rate = 0.1, .beta1 = 0.9, .beta2 = 0.9});
  scheduler::Decision decision;
  decision.verdict = scheduler::Verdict::kCommit;
  decision.scalars = submission.scalars;
  const auto run = [&](uint64_t attempt, scheduler::AttemptKind kind) {
    submission.kind = decision.kind = kind;
    submission.attempt = decision.attempt = scheduler::Attempt(attempt);
    decision.step = scheduler::StepId(static_cast<int64_t>(attempt));
    (*collector)->Arm(scheduler::Attempt(attempt));
    for (int32_t rank : {0, 1}) {
      const wire::TimelinePage page(pages[rank].data());
      for (uint32_t b = 0; b < buckets; ++b) wire::Advance(page.ready(b), attempt);
      wire::Advance(page.submitted(), attempt);
      submission.rank = scheduler::TrainerRank(rank);
      (*collector)->OnSubmission(submission);
    }
    const int64_t before = allocations.load();
    bool ok = true;
    while (ok && !(*collector)->complete()) ok = (*collector)->Progress().ok();
    (*updater)->Start(decision);
    publisher.Start({.attempt = decision.attempt, .submitted_first = true});
    while (ok && publisher.running()) {
      if (!(*updater)->done()) {
        auto batch = (*updater)->RunBatch();
        ok = batch.ok();
        if (ok) publisher.OnBatch(**batch);
      }
      ok = ok && publisher.Progress().ok();
    }
    EXPECT_TRUE(ok);
    return allocations.load() - before;
  };
  run(1, scheduler::AttemptKind::kPush);
  run(2, scheduler::AttemptKind::kStep);
  EXPECT_GT(allocations.load(), 0) << "nothing is counted";
  EXPECT_EQ(run(3, scheduler::AttemptKind::kStep), 0);
}

}  // namespace
}  // namespace dmuond::server::lane::testing
