// dmuonctl plan: of the running job or, with --model, of a model that nobody trains yet.
#include "scheduler/plan.h"

#include <algorithm>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "scheduler/limits.h"
#include "scheduler/model_layout.h"
#include "scheduler/model_shapes.h"
#include "server/ctl/connection.h"
#include "server/ctl/table.h"
#include "server/ctl/to_json.h"
#include "server/plan_summary.h"

namespace dmuond::server::ctl {
namespace {

// More lanes than this are shown as the heaviest and the lightest.
constexpr int kLanesShown = 32;
constexpr int kEndsShown = 8;

void AddLane(const v1::GetPlanReply::Lane& lane, Table& table) {
  table.Add({absl::StrCat(lane.lane()), HumanMicroseconds(lane.load_us()),
             HumanBytes(lane.memory_bytes()), absl::StrCat(lane.matrices()),
             absl::StrCat(lane.pieces()), absl::StrCat(lane.batches()),
             HumanBytes(lane.snapshot_bytes()), HumanBytes(lane.network_bytes())});
}

void Print(const v1::GetPlanReply& plan) {
  std::cout << PictureAge(plan.picture_age_ms());
  std::cout << absl::StrFormat(
      "update %s, proven lower bound %s (gap %s%s), imbalance %.4f\n"
      "%d lanes, %d buckets, digest %016x\n",
      HumanMicroseconds(plan.makespan_us()), HumanMicroseconds(plan.lower_bound_us()),
      HumanPercent(plan.gap()), plan.optimal() ? ", optimal" : "", plan.imbalance(),
      plan.lanes_size(), plan.buckets(), plan.digest());
  int64_t snapshot = 0;
  int64_t network = 0;
  for (const auto& lane : plan.lanes()) {
    snapshot += lane.snapshot_bytes();
    network += lane.network_bytes();
  }
  std::cout << "a snapshot has " << HumanBytes(snapshot)
            << ", and its copy takes as much host memory on all nodes together; "
            << (network == 0 ? "nothing" : HumanBytes(network))
            << " crosses between nodes in a step\n\n";
  std::vector<const v1::GetPlanReply::Lane*> lanes;
  for (const auto& lane : plan.lanes()) lanes.push_back(&lane);
  const bool all = plan.lanes_size() <= kLanesShown;
  if (!all) {
    std::stable_sort(lanes.begin(), lanes.end(),
                     [](const auto* a, const auto* b) { return a->load_us() > b->load_us(); });
  }
  Table table({">lane", ">update", ">memory", ">matrices", ">pieces", ">batches", ">snapshot",
               ">sends a step"});
  for (size_t i = 0; i < lanes.size(); ++i) {
    if (all || i < kEndsShown || i + kEndsShown >= lanes.size()) AddLane(*lanes[i], table);
    if (!all && i == kEndsShown) table.Add({"…", "", "", "", "", "", "", ""});
  }
  std::cout << table.Text();
  if (!all) {
    std::cout << "the " << kEndsShown << " heaviest and the " << kEndsShown
              << " lightest lanes; --json has all\n";
  }
}

absl::StatusOr<v1::GetPlanReply> PlanOffline(const Options& options) {
  if (options.lanes < 1 || options.nodes < 1 ||
      options.lanes > scheduler::kLanesMax / options.nodes) {
    return absl::InvalidArgumentError(
        absl::StrCat("--lanes=", options.lanes, " --nodes=", options.nodes,
                     " is not between 1 and ", scheduler::kLanesMax, " lanes in all"));
  }
  ASSIGN_OR_RETURN(const auto model, scheduler::FindModelShapes(options.model, options.layers));
  scheduler::PlanInputs inputs;
  inputs.nodes = options.nodes;
  inputs.lanes_per_node = options.lanes;
  inputs.lane_memory_bytes = options.lane_memory_bytes;
  inputs.layout = scheduler::LayoutOf(model, options.nodes, options.lanes);
  ASSIGN_OR_RETURN(const auto plan, scheduler::MakePlan(inputs));
  v1::GetPlanReply reply = Summarize(plan);
  RETURN_IF_ERROR(AddNetwork(inputs, plan, reply));
  return reply;
}

}  // namespace

int RunPlan(const Options& options, const Arguments& arguments) {
  if (!arguments.empty()) return FailUsage("plan takes no arguments, only flags");
  const bool offline = !options.model.empty();
  const auto plan =
      offline ? PlanOffline(options)
              : Call(options, &v1::Admin::Stub::GetPlan, AboutJob<v1::GetPlanRequest>(options));
  if (!plan.ok()) return Fail(plan.status());
  if (options.json) {
    Json json = ToJson(*plan);
    if (offline) {
      json["model"] = options.model;
      json["nodes"] = options.nodes;
      json["lanes_per_node"] = options.lanes;
    }
    PrintJson(json);
    return kExitOk;
  }
  if (offline) {
    std::cout << options.model << " on " << options.nodes << " nodes of " << options.lanes
              << " lanes; costs of the default preset, by FLOPs and bytes at "
              << scheduler::CostTable().tflops << " TFLOP/s and "
              << scheduler::CostTable().gigabytes_per_second << " GB/s\n";
  }
  Print(*plan);
  return kExitOk;
}

}  // namespace dmuond::server::ctl
