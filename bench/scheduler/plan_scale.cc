// This bench measures a job's registration in one process, from the bytes of the plan's inputs to a
// lane's program: milliseconds of each stage, bytes of the inputs, and memory. It runs one case at
// a time, because memory is counted for the process:
//
//   plan_scale one-trainer | sharded-llama3-70b | replicated-llama3-8b | columns
#include <malloc.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "scheduler/convert/convert.h"
#include "scheduler/convert/registrations.h"
#include "scheduler/lane_program.h"
#include "scheduler/model_layout.h"
#include "scheduler/plan.h"

namespace dmuond::server {
namespace {

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
  for (const scheduler::Fragment& fragment : layout.fragments) {
    if (fragment.rank == trainer.rank) registration.fragments.push_back(fragment);
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

double MemoryMiB(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(field, 0) == 0)
      return std::strtod(line.c_str() + field.size() + 1, nullptr) / 1024;
  }
  return 0;
}

template <typename Work>
auto Timed(const char* stage, Work work) {
  const auto start = std::chrono::steady_clock::now();
  auto result = work();
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  std::printf("%-24s %9.1f ms %9.1f MiB now %9.1f MiB at most\n", stage, took.count(),
              MemoryMiB("VmRSS"), MemoryMiB("VmHWM"));
  return result;
}

// As the coordinator makes them of what its members send.
std::string Inputs(const Case& of) {
  std::map<int32_t, v1::Registration> registrations;
  int64_t sent_bytes = 0;
  for (int32_t rank = 0; rank < of.trainers(); ++rank) {
    registrations[rank] = Pack(OnTheWire(of, rank));
    sent_bytes += static_cast<int64_t>(registrations[rank].ByteSizeLong());
  }
  v1::PlanInputs inputs;
  inputs.set_job("bench");
  inputs.set_nodes(of.nodes);
  inputs.set_lanes_per_node(of.lanes_per_node);
  std::printf("# registrations of %.3f MB\n", static_cast<double>(sent_bytes) / 1e6);
  const absl::Status added =
      Timed("make classes", [&] { return AddRegistrations(registrations, inputs); });
  if (!added.ok()) std::exit(1);
  return inputs.SerializeAsString();
}

template <typename Value>
Value Must(absl::StatusOr<Value> value) {
  if (value.ok()) return *std::move(value);
  std::fprintf(stderr, "%s\n", value.status().ToString().c_str());
  std::exit(1);
}

void Run(const std::string& name, const Case& of) {
  std::string bytes = Inputs(of);
  malloc_trim(0);
  // From here on the most memory is counted anew.
  std::ofstream("/proc/self/clear_refs") << "5";
  std::printf("# %s: %d trainers on %d nodes of %d lanes; inputs of %.3f MB\n", name.c_str(),
              of.trainers(), of.nodes, of.lanes_per_node, static_cast<double>(bytes.size()) / 1e6);
  {
    const v1::Registration wire = OnTheWire(of, 0);
    Timed("check one trainer's", [&] {
      const scheduler::Registration registration = Must(FromProto(wire));
      return scheduler::Validate(registration).ok();
    });
  }
  const scheduler::PlanInputs inputs = [&] {
    const v1::PlanInputs wire = Timed("parse the inputs", [&] {
      v1::PlanInputs parsed;
      if (!parsed.ParseFromString(bytes)) std::exit(1);
      return parsed;
    });
    bytes = {};
    return Timed("merge registrations", [&] { return Must(FromProto(wire)); });
  }();
  const scheduler::Plan plan = Timed("MakePlan", [&] { return Must(scheduler::MakePlan(inputs)); });
  Timed("MakeLaneProgram",
        [&] { return Must(scheduler::MakeLaneProgram(inputs, plan, scheduler::LaneId(0))); });
  std::printf("# %zu parameters, %zu fragments, %zu units, plan %016llx\n",
              inputs.layout.parameters.size(), inputs.layout.fragments.size(), plan.units.size(),
              static_cast<unsigned long long>(plan.digest));
}

}  // namespace
}  // namespace dmuond::server

int main(int argc, char** argv) {
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
