// This bench measures what a job's size costs the coordinating node's daemon, from the messages of
// all ranks to the programs of its lanes, and then one of these lanes, in a process of its own:
// milliseconds of each stage, bytes of what is sent, and memory. It runs one case at a time,
// because memory is counted for the process:
//
//   plan_scale CASE   (without one it names them)
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "bench/scheduler/plan_scale_lane.h"
#include "scheduler/convert/convert.h"
#include "scheduler/convert/registrations.h"
#include "scheduler/job/group_job.h"
#include "scheduler/lane_program.h"
#include "scheduler/model_layout.h"
#include "scheduler/plan.h"

namespace dmuond::server {
namespace {

using bench::Timed;

struct Case {
  int32_t nodes = 1;
  int32_t lanes_per_node = 1;
  std::function<scheduler::Registration(int32_t rank)> registration;
  [[nodiscard]] int32_t trainers() const { return nodes * lanes_per_node; }
};

// Contiguous in its arenas, behind what the registration has already.
void Hold(scheduler::Registration& registration, scheduler::Parameter parameter,
          const scheduler::Box& box) {
  scheduler::Fragment fragment;
  fragment.rank = registration.rank;
  fragment.parameter = static_cast<int32_t>(registration.parameters.size());
  fragment.box = box;
  int64_t offset_bytes = 0;
  if (!registration.fragments.empty()) {
    const scheduler::Fragment& last = registration.fragments.back();
    offset_bytes = last.weight.offset_bytes + 4 * scheduler::Elements(last.box);
  }
  const scheduler::Extents strides = scheduler::RowMajorStrides(scheduler::ShapeOf(box));
  fragment.gradient = {0, offset_bytes, strides};
  fragment.weight = {1, offset_bytes, strides};
  registration.parameters.push_back(std::move(parameter));
  registration.fragments.push_back(std::move(fragment));
}

scheduler::Parameter OneParameter(const std::string& name, scheduler::Extents shape,
                                  scheduler::Route route) {
  scheduler::Parameter parameter;
  parameter.name = name;
  parameter.shape = std::move(shape);
  parameter.route = route;
  return parameter;
}

// 10,000 parameters: seven matrices of different shapes and three vectors, time and again.
scheduler::Registration OneTrainer(int32_t rank) {
  scheduler::Registration registration;
  registration.rank = scheduler::TrainerRank(rank);
  for (int64_t i = 0; i < 10'000; ++i) {
    const std::string name = absl::StrCat("layers.", i / 10, ".parameter.", i % 10);
    const scheduler::Extents shape =
        i % 10 < 7 ? scheduler::Extents{64 * (1 + i % 10), 256} : scheduler::Extents{256};
    Hold(registration,
         OneParameter(name, shape, i % 10 < 7 ? scheduler::Route::kMuon : scheduler::Route::kAdamW),
         scheduler::WholeBox(shape));
  }
  return registration;
}

// Rows that tensor parallel has cut into eight, and FSDP cuts again: what torch calls strided.
scheduler::Registration Strided(const scheduler::ModelShapes& model, int32_t rank,
                                int32_t world_size) {
  constexpr int32_t kTensor = 8;
  scheduler::Registration registration =
      scheduler::ShardedRegistration(model, rank, world_size, kTensor);
  const auto cut = [](int64_t& begin, int64_t& end, int32_t parts, int32_t part) {
    const int64_t chunk = (end - begin + parts - 1) / parts;
    end = std::min(end, begin + chunk * (part + 1));
    begin = std::min(end, begin + chunk * part);
  };
  int64_t offset_bytes = 0;
  for (scheduler::Fragment& fragment : registration.fragments) {
    const scheduler::Parameter& parameter = registration.parameters[fragment.parameter];
    fragment.box = scheduler::WholeBox(parameter.shape);
    cut(fragment.box.begin[0], fragment.box.end[0], kTensor, rank % kTensor);
    cut(fragment.box.begin[0], fragment.box.end[0], world_size / kTensor, rank / kTensor);
    const scheduler::Extents strides = scheduler::RowMajorStrides(scheduler::ShapeOf(fragment.box));
    fragment.gradient = {0, offset_bytes, strides};
    fragment.weight = {1, offset_bytes, strides};
    offset_bytes += scheduler::Elements(fragment.box) * scheduler::SizeOf(parameter.weight_type);
  }
  return registration;
}

// AdamW tensors that are cut into columns.
scheduler::Registration Columns(int32_t rank, int32_t world_size, int32_t lanes_per_node) {
  scheduler::Registration registration;
  registration.rank = scheduler::TrainerRank(rank);
  registration.node = scheduler::NodeRank(rank / lanes_per_node);
  registration.home = scheduler::LaneIndex(rank % lanes_per_node);
  for (int i = 0; i < 32; ++i) {
    const scheduler::Extents shape = {4096, int64_t{64} * world_size};
    Hold(registration, OneParameter(absl::StrCat("embedding.", i), shape, scheduler::Route::kAdamW),
         {{0, int64_t{64} * rank}, {4096, int64_t{64} * (rank + 1)}});
  }
  return registration;
}

scheduler::Registration Replicated(const scheduler::Layout& layout, int32_t rank) {
  scheduler::Registration registration;
  const scheduler::Trainer& trainer = layout.trainers[rank];
  registration.rank = trainer.rank;
  registration.node = trainer.node;
  registration.home = trainer.home;
  registration.parameters = layout.parameters;
  for (size_t f = 0; f < layout.fragments.size(); ++f) {
    if (layout.fragments[f].rank != trainer.rank) continue;
    registration.fragments.push_back(layout.FragmentAt(f));
  }
  return registration;
}

std::map<std::string, Case> Cases() {
  constexpr int32_t kNodes = 128;
  constexpr int32_t kLanes = 8;
  constexpr int32_t kTrainers = kNodes * kLanes;
  return {
      {"one-trainer", {1, 1, OneTrainer}},
      {"sharded-llama3-70b",
       {kNodes, kLanes,
        [model = *scheduler::FindModelShapes("llama3-70b")](int32_t rank) {
          return scheduler::ShardedRegistration(model, rank, kTrainers, kLanes);
        }}},
      {"strided-llama3-70b",
       {kNodes, kLanes,
        [model = *scheduler::FindModelShapes("llama3-70b")](int32_t rank) {
          return Strided(model, rank, kTrainers);
        }}},
      {"replicated-llama3-8b",
       {kNodes, kLanes,
        [](int32_t rank) {
          static const scheduler::Layout one =
              scheduler::LayoutOf(*scheduler::FindModelShapes("llama3-8b"), 1, 1);
          scheduler::Registration registration = Replicated(one, 0);
          registration.rank = scheduler::TrainerRank(rank);
          registration.node = scheduler::NodeRank(rank / kLanes);
          registration.home = scheduler::LaneIndex(rank % kLanes);
          for (scheduler::Fragment& fragment : registration.fragments) {
            fragment.rank = registration.rank;
          }
          return registration;
        }}},
      {"columns", {kNodes, kLanes, [](int32_t rank) { return Columns(rank, kTrainers, kLanes); }}},
  };
}

v1::Registration OnTheWire(const Case& of, int32_t rank) {
  v1::Registration wire = ToProto(of.registration(rank));
  wire.set_job("bench");
  wire.set_world_size(of.trainers());
  wire.add_groups()->set_preset("keller");
  return wire;
}

template <typename Value>
Value Must(absl::StatusOr<Value> value) {
  if (value.ok()) return *std::move(value);
  std::fprintf(stderr, "%s\n", value.status().ToString().c_str());
  std::exit(1);
}

using scheduler::TimePoint;

// The coordinator hears of every rank, as its members' messages have it: the time is that of
// reading and of deciding. What it wants planned then.
scheduler::PlanOrder Register(const Case& of, scheduler::GroupJob& job) {
  constexpr uint32_t kEpoch = 1;
  (void)job.OnFormed(TimePoint(), kEpoch);
  for (int32_t node = 0; node < of.nodes; ++node) {
    v1::MemberMessage message;
    message.mutable_member_state()->set_epoch(kEpoch);
    (void)job.OnMessage(TimePoint(), node, message);
  }
  std::optional<scheduler::PlanOrder> order;
  bench::Stopwatch watch;
  int64_t sent_bytes = 0;
  for (const bool registers : {false, true}) {
    for (int32_t rank = 0; rank < of.trainers(); ++rank) {
      v1::MemberMessage message;
      if (registers) {
        *message.mutable_registration() = Pack(OnTheWire(of, rank));
      } else {
        v1::RankSession& session = *message.mutable_rank_session();
        session.set_rank(rank);
        session.set_job("bench");
        session.set_world_size(of.trainers());
      }
      const std::string bytes = message.SerializeAsString();
      sent_bytes += static_cast<int64_t>(bytes.size());
      watch.Start();
      v1::MemberMessage heard;
      if (!heard.ParseFromString(bytes)) std::exit(1);
      scheduler::GroupActions actions = job.OnMessage(TimePoint(), rank / of.lanes_per_node, heard);
      watch.Stop();
      if (!actions.plans.empty()) order = std::move(actions.plans.front());
    }
  }
  if (!order.has_value()) std::exit(1);
  watch.Print("register");
  std::printf("# heard %.3f MB\n", static_cast<double>(sent_bytes) / 1e6);
  return *std::move(order);
}

void Run(const std::string& name, const Case& of) {
  scheduler::GroupJobOptions options;
  options.nodes = of.nodes;
  options.lanes_per_node = of.lanes_per_node;
  scheduler::GroupJob job(options);
  const scheduler::PlanOrder order = Register(of, job);
  std::printf("# %s: %d trainers on %d nodes of %d lanes; inputs of %.3f MB\n", name.c_str(),
              of.trainers(), of.nodes, of.lanes_per_node,
              static_cast<double>(order.inputs->ByteSizeLong()) / 1e6);
  {
    const v1::Registration wire = OnTheWire(of, 0);
    Timed("check one trainer's", [&] {
      const scheduler::Registration registration = Must(FromProto(wire));
      return scheduler::Validate(registration).ok();
    });
  }
  auto inputs = std::make_shared<const scheduler::PlanInputs>(
      Timed("merge registrations", [&] { return Must(FromProto(*order.inputs)); }));
  auto plan = std::make_shared<const scheduler::Plan>(
      Timed("MakePlan", [&] { return Must(scheduler::MakePlan(*inputs)); }));
  Timed("tell the plan", [&] {
    return job.OnPlanMade(TimePoint(), order, scheduler::PlannedJob{inputs, plan}).messages.size();
  });
  const std::vector<v1::LaneProgram> programs = Timed("programs of a node", [&] {
    std::vector<v1::LaneProgram> made;
    for (int32_t lane = 0; lane < of.lanes_per_node; ++lane) {
      made.push_back(
          ToProto(Must(scheduler::MakeLaneProgram(*inputs, *plan, scheduler::LaneId(lane)))));
    }
    return made;
  });
  std::printf("# %zu parameters, %zu fragments, %zu units, plan %016llx\n",
              inputs->layout.parameters.size(), inputs->layout.fragments.size(), plan->units.size(),
              static_cast<unsigned long long>(plan->digest));
  const auto largest = std::max_element(
      programs.begin(), programs.end(),
      [](const auto& a, const auto& b) { return a.ByteSizeLong() < b.ByteSizeLong(); });
  std::printf("# lane %d: a program of %.3f MB\n", largest->lane(),
              static_cast<double>(largest->ByteSizeLong()) / 1e6);
  bench::RunAsLane(*largest);
}

}  // namespace
}  // namespace dmuond::server

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == dmuond::bench::kAsLane) {
    return dmuond::bench::BeLane(argv[2]);
  }
  const auto cases = dmuond::server::Cases();
  const auto found = argc == 2 ? cases.find(argv[1]) : cases.end();
  if (found == cases.end()) {
    std::fprintf(stderr, "usage: plan_scale CASE, one of:\n");
    for (const auto& [name, one] : cases) std::fprintf(stderr, "  %s\n", name.c_str());
    return 2;
  }
  dmuond::server::Run(found->first, found->second);
  return 0;
}
