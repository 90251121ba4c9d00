// Steps from end to end, with real processes: `control` is what a step costs when there is nothing
// to compute, `copies` is one of collecting and publishing alone, `model` is a step on about 50
// million parameters (seven layers of a transformer of width 768) beside the bare matrix products
// that it needs, and its collecting and publishing beside a plain memcpy; `wide` is the same on as
// many parameters in matrices whose symmetric products, where a lane does half, are a small part.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "bench/common/program.h"
#include "bench/step/baselines.h"
#include "bench/step/scenario.h"
#include "kernels/cpu/core_type.h"
#include "nlohmann/json.hpp"

ABSL_FLAG(int32_t, steps, 2000, "measured steps of `control`");
ABSL_FLAG(int32_t, model_steps, 3, "measured steps of `model` and `wide`; 0: leave them out");
ABSL_FLAG(int32_t, threads, 0, "threads of the lane but in `control`; 0: one per core");

namespace dmuond::bench {
namespace {

using nlohmann::json;

void PrintHeader() {
  std::printf(
      "# A step is from Step() until the new weights lie in the trainer's arena, rank 0.\n");
  std::printf("#\n#%9s %12s %8s %5s %7s %6s %12s %12s %12s\n", "name", "parameters", "trainers",
              "lanes", "threads", "steps", "p50", "p99", "least");
  std::printf("#%9s %12s %8s %5s %7s %6s %12s %12s %12s\n", "", "", "", "", "", "", "(us)", "(us)",
              "(us)");
}

void PrintRow(const Scenario& scenario, const Measured& measured, json& results) {
  std::printf("%10s %12lld %8d %5d %7d %6d %12.1f %12.1f %12.1f\n", scenario.name.c_str(),
              static_cast<long long>(scenario.model.parameters()),  // NOLINT(google-runtime-int)
              scenario.trainers, scenario.lanes, scenario.threads, scenario.steps,
              measured.Percentile(0.5), measured.Percentile(0.99), measured.step_us.front());
  std::fflush(stdout);
  results["steps"].push_back({{"name", scenario.name},
                              {"parameters", scenario.model.parameters()},
                              {"trainers", scenario.trainers},
                              {"lanes", scenario.lanes},
                              {"threads", scenario.threads},
                              {"steps", scenario.steps},
                              {"p50_us", measured.Percentile(0.5)},
                              {"p99_us", measured.Percentile(0.99)},
                              {"least_us", measured.step_us.front()}});
}

void Compare(const char* what, double value, const char* unit, const char* with, double baseline,
             json& results) {
  std::printf("# %-34s %10.3f %-5s %-34s %10.3f %-5s ratio %.3f\n", what, value, unit, with,
              baseline, unit, value / baseline);
  results["comparisons"].push_back({{"what", what},
                                    {"value", value},
                                    {"unit", unit},
                                    {"with", with},
                                    {"baseline", baseline},
                                    {"ratio", value / baseline}});
}

// Work on memory alone, by the lane's own clock, beside a plain copy: bytes read and written per
// second. What a step waits for is in its time, not here.
void CompareMemory(const Scenario& scenario, const Measured& measured, json& results) {
  if (measured.timings.empty()) return;
  double sum_gbs = 0;
  double copy_gbs = 0;
  double collect_us = measured.timings[0].collect_us;
  double norm_us = measured.timings[0].norm_us;
  for (const client::StepTiming& timing : measured.timings) {
    const auto rate = [](int64_t bytes, double us) {
      return us > 0 ? static_cast<double>(bytes) / us / 1e3 : 0;
    };
    sum_gbs = std::max(sum_gbs, rate(timing.sum_bytes, timing.sum_us));
    copy_gbs = std::max(copy_gbs, rate(timing.copy_bytes, timing.copy_us));
    collect_us = std::min(collect_us, timing.collect_us);
    norm_us = std::min(norm_us, timing.norm_us);
  }
  const int64_t bytes = scenario.model.parameters() * static_cast<int64_t>(sizeof(float));
  const double memcpy_gbs = 2 * MemcpyBytesPerSecond(bytes, scenario.threads, /*repeats=*/30) / 1e9;
  const std::string name = scenario.name + ": ";
  Compare((name + "sums of gradients, with norms").c_str(), sum_gbs, "GB/s", "memcpy, same threads",
          memcpy_gbs, results);
  Compare((name + "copies of new weights").c_str(), copy_gbs, "GB/s", "memcpy, same threads",
          memcpy_gbs, results);
  std::printf(
      "# %s: %lld bytes of sums, %lld of copies a step; collecting with its waits %.0f us, "
      "norms in a pass of their own %.0f us\n",
      scenario.name.c_str(),
      static_cast<long long>(measured.timings.back().sum_bytes),   // NOLINT
      static_cast<long long>(measured.timings.back().copy_bytes),  // NOLINT
      collect_us, norm_us);
}

void CompareProducts(const Scenario& scenario, const Measured& measured, json& results) {
  const auto products = [&](ProductWork work) {
    return ProductSeconds(scenario.model.matrices, scenario.threads, /*repeats=*/3, work);
  };
  const double least = measured.step_us.front() / 1e6;
  const std::string what = scenario.name + ": least step";
  Compare(what.c_str(), least, "s", "bare products, whole (OpenBLAS)",
          products(ProductWork::kWhole), results);
  Compare(what.c_str(), least, "s", "bare products, one triangle",
          products(ProductWork::kLowerBlocks), results);
}

absl::Status Measure(json& results) {
  PrintHeader();
  const int threads = ThreadsOr(absl::GetFlag(FLAGS_threads));
  std::vector<Scenario> scenarios = {{.name = "control",
                                      .model = {.vector = 1},
                                      .trainers = 2,
                                      .steps = absl::GetFlag(FLAGS_steps),
                                      .warmup = 200},
                                     {.name = "copies",
                                      .model = {.vector = 1024 * 4096},
                                      .threads = threads,
                                      .steps = 20,
                                      .warmup = 2}};
  if (absl::GetFlag(FLAGS_model_steps) > 0) {
    const std::pair<const char*, std::vector<Matrices>> models[] = {
        {"model", {{768, 768, 28}, {3072, 768, 7}, {768, 3072, 7}}}, {"wide", {{512, 2048, 48}}}};
    for (const auto& [name, matrices] : models) {
      scenarios.push_back({.name = name,
                           .model = {.matrices = matrices},
                           .threads = threads,
                           .steps = absl::GetFlag(FLAGS_model_steps)});
    }
  }
  for (const Scenario& scenario : scenarios) {
    const absl::StatusOr<Measured> measured = Run(scenario);
    if (!measured.ok()) {
      return absl::Status(measured.status().code(),
                          absl::StrCat(scenario.name, ": ", measured.status().message()));
    }
    PrintRow(scenario, *measured, results);
    if (scenario.name != "control") CompareMemory(scenario, *measured, results);
    if (!scenario.model.matrices.empty()) CompareProducts(scenario, *measured, results);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace dmuond::bench

int main(int argc, char** argv) {
  // OpenBLAS reads its environment when it is loaded: the bare products must run with the same
  // kernels as the lanes', on threads of ours.
  const std::string core_type = dmuond::kernels::cpu::OpenBlasCoreType();
  if (std::getenv("OPENBLAS_NUM_THREADS") == nullptr ||
      (!core_type.empty() && std::getenv(dmuond::kernels::cpu::kCoreTypeVariable) == nullptr)) {
    ::setenv("OPENBLAS_NUM_THREADS", "1", 1);
    if (!core_type.empty()) ::setenv(dmuond::kernels::cpu::kCoreTypeVariable, core_type.c_str(), 0);
    ::execv("/proc/self/exe", argv);
  }
  return dmuond::bench::RunProgram({.name = "step_bench",
                                    .usage = "measures whole steps through a dmuond of its own",
                                    .measure = dmuond::bench::Measure,
                                    .train = dmuond::bench::RunTrainer},
                                   argc, argv);
}
