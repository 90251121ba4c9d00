// What a lane makes of the program that it is told: the same as was said, and of one that cannot be
// followed an error, whatever is wrong with it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "dmuond/wire/frame.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/cpu_memory.h"
#include "scheduler/convert/convert.h"
#include "scheduler/plan.h"
#include "server/lane/collector.h"
#include "server/lane/gloo_group.h"
#include "server/lane/lane.h"
#include "server/lane/publisher.h"
#include "server/lane/rail.h"
#include "server/lane/slots.h"
#include "server/lane/snapshot_copy.h"
#include "server/lane/updater.h"
#include "server/shared/publish_board.h"
#include "tests/scheduler/layouts.h"

namespace dmuond::server::lane::testing {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using scheduler::testing::AdamW;
using scheduler::testing::Muon;
using scheduler::testing::World;
using ::testing::HasSubstr;

// Two nodes of two lanes: sums of replicas, shards with and without a home, stacked matrices.
std::vector<scheduler::LaneProgram> Programs() {
  World world(4, 2, 2);
  world.Replicate(Muon("replicated", {24, 16}))
      .ShardRows(Muon("sharded", {10, 8}))
      .Replicate(AdamW("vector", {40}))
      .ShardRows(AdamW("shards", {9, 4}))
      .Hold(0, Muon("experts", {2, 8, 4}), {{0, 0, 0}, {2, 8, 4}})
      .Replicate(AdamW("scalar", {}), scheduler::Contribution::kSame);
  const scheduler::PlanInputs inputs = *world.Inputs();
  const scheduler::Plan plan = *scheduler::MakePlan(inputs);
  std::vector<scheduler::LaneProgram> programs;
  for (int32_t lane = 0; lane < 4; ++lane) {
    programs.push_back(*scheduler::MakeLaneProgram(inputs, plan, scheduler::LaneId(lane)));
  }
  return programs;
}

TEST(ProgramTest, IsReadAsItWasSaid) {
  for (const scheduler::LaneProgram& program : Programs()) {
    const v1::LaneProgram wire = ToProto(program);
    const auto read = FromProto(wire);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(ToProto(*read).DebugString(), wire.DebugString());
    EXPECT_EQ(read->plan_digest, program.plan_digest);
    EXPECT_EQ(read->rail, program.rail);
    EXPECT_EQ(read->node, program.node);
    ASSERT_EQ(read->slot_classes.size(), program.slot_classes.size());
    for (size_t c = 0; c < program.slot_classes.size(); ++c) {
      EXPECT_EQ(read->slot_classes[c].slot_bytes, program.slot_classes[c].slot_bytes);
    }
  }
}

// A lane that has been told `configure`, with as much memory as it says, up to where it is ready.
absl::Status Follow(const v1::LaneCommand::Configure& configure, kernels::Device& device) {
  kernels::cpu::CpuMemoryHolder holder;
  std::vector<wire::UniqueFd> fds;
  for (const int64_t bytes : {configure.state_bytes(), configure.staging_bytes(),
                              configure.state_table_bytes(), configure.publish_board_bytes()}) {
    auto fd = holder.Allocate(bytes, "test");
    if (!fd.ok()) return fd.status();
    fds.push_back(*std::move(fd));
  }
  auto job = LaneJob::Make(configure, fds, device);
  if (!job.ok()) return job.status();
  Channel channel{wire::UniqueFd()};
  Rail rail(**job, channel, nullptr);
  auto stream = *device.CreateStream();
  TrainerMemory trainers(**job, device);
  auto slots = Slots::Create(**job);
  if (!slots.ok()) return slots.status();
  absl::Status status = Collector::Create(**job, trainers, rail, device, *stream).status();
  status.Update(Updater::Create(**job, **slots, device, *stream).status());
  status.Update(Publisher::Create(**job, trainers, rail, device).status());
  status.Update(SnapshotCopy::Create(**job, **slots, device, *stream).status());
  return status;
}

v1::LaneCommand::Configure ConfigureFor(const scheduler::LaneProgram& program) {
  v1::LaneCommand::Configure configure;
  *configure.mutable_program() = ToProto(program);
  configure.set_epoch(1);
  configure.set_job("test");
  configure.add_groups()->set_preset("keller");
  configure.set_state_bytes(program.state_bytes);
  configure.set_staging_bytes(program.staging_bytes);
  configure.set_state_table_bytes(static_cast<int64_t>(StateTableBytes(program.plan_units)));
  configure.set_publish_board_bytes(
      static_cast<int64_t>(PublishBoardBytes(program.buckets(), program.lanes_per_node)));
  return configure;
}

// Gives every number in the message, one at a time, a few other values.
void ForEachChange(Message& message, const std::function<void(const std::string&)>& changed,
                   const std::string& path = "") {
  const Reflection& reflection = *message.GetReflection();
  std::vector<const FieldDescriptor*> fields;
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    fields.push_back(message.GetDescriptor()->field(i));
  }
  const auto each = [&](const FieldDescriptor& field, auto value, const auto& set) {
    using Value = decltype(value);
    for (const int64_t delta : {-1, 1, 2, 300}) {
      set(static_cast<Value>(static_cast<uint64_t>(value) + static_cast<uint64_t>(delta)));
      changed(path + field.name() + " " + std::to_string(delta));
    }
    for (const Value extreme :
         {std::numeric_limits<Value>::min(), std::numeric_limits<Value>::max(),
          static_cast<Value>(std::numeric_limits<Value>::max() / 2)}) {
      set(extreme);
      changed(path + field.name() + " = " + std::to_string(extreme));
    }
    set(value);
  };
  for (const FieldDescriptor* field : fields) {
    const int count = field->is_repeated() ? reflection.FieldSize(message, field)
                      : field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE ||
                              reflection.HasField(message, field)
                          ? 1
                          : 0;
    for (int i = 0; i < count; ++i) {
      const auto number = [&](auto get, auto get_one, auto set, auto set_one) {
        const auto value = field->is_repeated() ? (reflection.*get_one)(message, field, i)
                                                : (reflection.*get)(message, field);
        each(*field, value, [&](auto to) {
          field->is_repeated() ? (reflection.*set_one)(&message, field, i, to)
                               : (reflection.*set)(&message, field, to);
        });
      };
      switch (field->cpp_type()) {
        case FieldDescriptor::CPPTYPE_MESSAGE:
          ForEachChange(field->is_repeated()
                            ? *reflection.MutableRepeatedMessage(&message, field, i)
                            : *reflection.MutableMessage(&message, field),
                        changed, path + field->name() + ".");
          break;
        case FieldDescriptor::CPPTYPE_INT32:
          number(&Reflection::GetInt32, &Reflection::GetRepeatedInt32, &Reflection::SetInt32,
                 &Reflection::SetRepeatedInt32);
          break;
        case FieldDescriptor::CPPTYPE_INT64:
          number(&Reflection::GetInt64, &Reflection::GetRepeatedInt64, &Reflection::SetInt64,
                 &Reflection::SetRepeatedInt64);
          break;
        case FieldDescriptor::CPPTYPE_UINT32:
          number(&Reflection::GetUInt32, &Reflection::GetRepeatedUInt32, &Reflection::SetUInt32,
                 &Reflection::SetRepeatedUInt32);
          break;
        case FieldDescriptor::CPPTYPE_ENUM:
          number(&Reflection::GetEnumValue, &Reflection::GetRepeatedEnumValue,
                 &Reflection::SetEnumValue, &Reflection::SetRepeatedEnumValue);
          break;
        default:
          break;
      }
      if (!field->is_repeated()) continue;
      // One fewer, and one twice.
      if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE && i + 1 < count) {
        reflection.SwapElements(&message, field, i, i + 1);
        changed(path + field->name() + " swapped");
        reflection.SwapElements(&message, field, i, i + 1);
      }
    }
    if (field->is_repeated() && count > 0 &&
        field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      Message* last = reflection.ReleaseLast(&message, field);
      changed(path + field->name() + " without its last");
      reflection.AddAllocatedMessage(&message, field, last);
    }
  }
}

TEST(ProgramTest, WhateverIsWrongWithAProgramTheLaneDoesNotCrash) {
  auto device = kernels::cpu::CpuDevice::Create(1);
  ASSERT_TRUE(device.ok());
  int followed = 0;
  int refused = 0;
  for (const scheduler::LaneProgram& program : Programs()) {
    v1::LaneCommand::Configure configure = ConfigureFor(program);
    ASSERT_TRUE(Follow(configure, **device).ok()) << Follow(configure, **device);
    ForEachChange(*configure.mutable_program(), [&](const std::string& what) {
      SCOPED_TRACE(what);
      ++(Follow(configure, **device).ok() ? followed : refused);
    });
  }
  // Other places within the same memory can be followed, as can arenas and strides until a trainer
  // attaches.
  EXPECT_GT(refused, 4 * followed);
  EXPECT_GT(followed, 0);
}

TEST(ProgramTest, WhatLeadsNowhereIsNamed) {
  const std::vector<scheduler::LaneProgram> programs = Programs();
  const auto refuse = [&](const std::function<void(scheduler::LaneProgram&)>& change) {
    scheduler::LaneProgram program = programs[0];
    change(program);
    return std::string(CheckLaneProgram(program).message());
  };
  EXPECT_EQ(refuse([](auto&) {}), "");
  EXPECT_THAT(refuse([](auto& p) { p.lane = scheduler::LaneId(4); }), HasSubstr("lane 4 of 4"));
  EXPECT_THAT(refuse([](auto& p) { p.units[0].holders.push_back(1000); }),
              HasSubstr("fragment 1000 does not hold unit"));
  EXPECT_THAT(refuse([](auto& p) { p.staged.pop_back(); }),
              HasSubstr("no place in staging memory"));
  EXPECT_THAT(refuse([](auto& p) { p.staged[0].gradient_offset_bytes = p.staging_bytes; }),
              HasSubstr("no place in staging memory"));
  EXPECT_THAT(refuse([](auto& p) { p.state_bytes -= 1; }), HasSubstr("slots of"));
  EXPECT_THAT(refuse([](auto& p) { p.batches.pop_back(); }), HasSubstr("is in no batch"));
  EXPECT_THAT(refuse([](auto& p) { p.batches.push_back(p.batches[0]); }), HasSubstr("in batch"));
  EXPECT_THAT(refuse([](auto& p) { p.fragments[0].weight.strides.clear(); }), HasSubstr("strides"));
  EXPECT_THAT(refuse([](auto& p) {
                for (auto& bucket : p.partials) {
                  for (auto& t : bucket) t.offset_bytes = p.staging_bytes - 4;
                }
              }),
              HasSubstr("transfer of"));
  EXPECT_THAT(refuse([](auto& p) {
                for (auto& of : p.units) {
                  for (auto& cell : of.cells) cell.lowest.fragment = 0;
                }
              }),
              HasSubstr("with fragment 0"));
}

TEST(ProgramTest, ALaneEndsWithWordsWhenItCannotFollowItsProgram) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  wire::UniqueFd socket(ends[0]);
  std::thread thread([fd = ends[1]] {
    auto device = kernels::cpu::CpuDevice::Create(1);
    Lane(**device, wire::UniqueFd(fd), MakeGlooGroup).Run().IgnoreError();
  });
  v1::LaneCommand command;
  *command.mutable_configure() = ConfigureFor(Programs()[1]);
  command.mutable_configure()->mutable_program()->mutable_units(0)->set_bucket(77);
  EXPECT_TRUE(wire::SendFrame(socket.get(), command.SerializeAsString()).ok());
  const auto frame = wire::ReceiveFrame(socket.get());
  v1::LaneReport report;
  EXPECT_TRUE(frame.ok() && report.ParseFromString(frame->body));
  EXPECT_THAT(report.failed().what(), HasSubstr("bucket 77"));
  thread.join();
}

}  // namespace
}  // namespace dmuond::server::lane::testing
