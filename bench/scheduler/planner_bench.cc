// How long MakePlan and MakeLaneProgram take for known models, and how good the plans are.
// Counters: gap (makespan over the proven lower bound, minus 1), imbalance (slowest lane over the
// mean), units.
#include <string>

#include "benchmark/benchmark.h"
#include "scheduler/lane_program.h"
#include "scheduler/model_layout.h"
#include "scheduler/plan.h"

namespace dmuond::scheduler {
namespace {

PlanInputs InputsFor(const std::string& model, int32_t nodes, int32_t lanes_per_node) {
  PlanInputs inputs;
  inputs.nodes = nodes;
  inputs.lanes_per_node = lanes_per_node;
  inputs.layout = LayoutOf(*FindModelShapes(model), nodes, lanes_per_node);
  return inputs;
}

void BM_MakePlan(benchmark::State& state, const std::string& model) {
  const PlanInputs inputs =
      InputsFor(model, static_cast<int32_t>(state.range(0)), static_cast<int32_t>(state.range(1)));
  PlanQuality quality;
  size_t units = 0;
  while (state.KeepRunning()) {
    auto plan = MakePlan(inputs);
    if (!plan.ok()) {
      state.SkipWithError(plan.status().ToString().c_str());
      break;
    }
    quality = plan->quality;
    units = plan->units.size();
  }
  state.counters["units"] = static_cast<double>(units);
  state.counters["makespan_us"] = quality.makespan_us;
  state.counters["gap"] = quality.gap;
  state.counters["imbalance"] = quality.imbalance;
  state.counters["optimal"] = quality.optimal ? 1 : 0;
}

void BM_MakeLaneProgram(benchmark::State& state, const std::string& model) {
  const PlanInputs inputs =
      InputsFor(model, static_cast<int32_t>(state.range(0)), static_cast<int32_t>(state.range(1)));
  const auto plan = MakePlan(inputs);
  if (!plan.ok()) {
    state.SkipWithError(plan.status().ToString().c_str());
    return;
  }
  while (state.KeepRunning()) benchmark::DoNotOptimize(MakeLaneProgram(inputs, *plan, LaneId(0)));
}

BENCHMARK_CAPTURE(BM_MakePlan, llama3_8b, "llama3-8b")
    ->Args({1, 8})
    ->Args({16, 8})
    ->Args({128, 8})
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_MakePlan, moonlight_moe, "moonlight-moe")
    ->Args({8, 8})
    ->Args({128, 8})
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_MakePlan, wall_x, "wall-x")
    ->Args({1, 8})
    ->Args({4, 8})
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_MakePlan, qwen3_1_7b, "qwen3-1.7b")
    ->Args({1, 8})
    ->Args({8, 8})
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_MakeLaneProgram, llama3_8b, "llama3-8b")
    ->Args({1, 8})
    ->Args({128, 8})
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_MakeLaneProgram, moonlight_moe, "moonlight-moe")
    ->Args({128, 8})
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace dmuond::scheduler
