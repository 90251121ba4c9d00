// What it costs to lose nothing, with real processes: `snapshot` is how much a snapshot lengthens
// the steps beside it, `kills` how soon a job commits again after a trainer, a lane or a daemon was
// killed, `calm` what surviving costs a step to which nothing happens.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "bench/common/program.h"
#include "bench/recovery/beside_steps.h"
#include "bench/recovery/calm.h"
#include "bench/recovery/kills.h"
#include "bench/recovery/trainer.h"
#include "nlohmann/json.hpp"

ABSL_FLAG(std::vector<std::string>, only, (std::vector<std::string>{"kills", "calm", "snapshot"}),
          "what is measured");
ABSL_FLAG(int32_t, kills, 20, "of each kind");
ABSL_FLAG(int32_t, rounds, 9, "`calm`: runs with and without");
ABSL_FLAG(int32_t, steps, 2000, "`calm`: of each run");
ABSL_FLAG(int32_t, snapshots, 3, "`snapshot`: of each model");
ABSL_FLAG(double, gigabytes, 1, "`snapshot`: of optimizer state");
ABSL_FLAG(std::vector<std::string>, models, (std::vector<std::string>{"matrices", "adamw"}),
          "`snapshot`: matrices whose steps compute, a vector whose steps only read and write");
ABSL_FLAG(int32_t, threads, 0, "`snapshot`: of the lane; 0: one per core");

namespace dmuond::bench {
namespace {

using nlohmann::json;

bool Contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool Wanted(const std::string& part) { return Contains(absl::GetFlag(FLAGS_only), part); }

const char* Verdict(bool holds) { return holds ? "holds" : "MISSED"; }

absl::Status Kills(json& results) {
  std::printf("#\n# from OpenSession (trainer) or from the kill (others) to a committed step\n");
  std::printf("#%20s %6s %10s %10s %10s\n", "killed", "times", "p50 (s)", "max (s)", "wanted");
  using Kind = Victim::Kind;
  const std::vector<Victim> victims = {
      {.name = "trainer", .kind = Kind::kTrainer, .wanted_s = 1},
      {.name = "lane", .kind = Kind::kLane, .wanted_s = 0.5},
      {.name = "lane, 2 nodes", .kind = Kind::kLane, .nodes = 2, .node = 1, .wanted_s = 0.5},
      {.name = "only daemon", .kind = Kind::kDaemon, .wanted_s = 8},
      {.name = "coordinator", .kind = Kind::kDaemon, .nodes = 2, .wanted_s = 8},
      {.name = "other daemon", .kind = Kind::kDaemon, .nodes = 2, .node = 1, .wanted_s = 8}};
  for (const Victim& victim : victims) {
    const auto seconds = Kill(victim, absl::GetFlag(FLAGS_kills));
    if (!seconds.ok()) return seconds.status();
    const double middle = (*seconds)[seconds->size() / 2];
    const double longest = seconds->back();
    std::printf("%21s %6zu %10.3f %10.3f %10.1f %s\n", victim.name.c_str(), seconds->size(), middle,
                longest, victim.wanted_s, Verdict(longest <= victim.wanted_s));
    std::fflush(stdout);
    results["kills"].push_back({{"killed", victim.name},
                                {"seconds", *seconds},
                                {"p50_s", middle},
                                {"max_s", longest},
                                {"wanted_s", victim.wanted_s}});
  }
  return absl::OkStatus();
}

absl::Status CalmSteps(json& results) {
  const auto calm = CompareCalm(absl::GetFlag(FLAGS_rounds), absl::GetFlag(FLAGS_steps));
  if (!calm.ok()) return calm.status();
  const double ratio = calm->survives_us / calm->bare_us;
  const double points_us = calm->points * calm->point_ns / 1e3;
  std::printf("#\n# calm: medians of %d runs each, two trainers, nothing to compute\n",
              calm->rounds);
  std::printf("%24s %10.1f us a step\n", "bare", calm->bare_us);
  std::printf("%24s %10.1f us a step, ratio %.3f, wanted 1.02: %s\n", "survives", calm->survives_us,
              ratio, Verdict(ratio <= 1.02));
  std::printf("%24s %10.1f passed in a step, %.2f ns each: %.3f us, %.3f %% of a bare step\n",
              "fault points", calm->points, calm->point_ns, points_us,
              100 * points_us / calm->bare_us);
  results["calm"] = {{"bare_us", calm->bare_us},
                     {"survives_us", calm->survives_us},
                     {"ratio", ratio},
                     {"points", calm->points},
                     {"point_ns", calm->point_ns}};
  return absl::OkStatus();
}

absl::Status Snapshots(json& results) {
  const int threads = ThreadsOr(absl::GetFlag(FLAGS_threads));
  std::printf("#\n# snapshots beside steps; the sum of all steps that one was made beside\n");
  std::printf("#%10s %10s %10s %12s %8s %12s %12s %8s\n", "model", "state (GB)", "snapshots",
              "takes (s)", "steps", "sum (s)", "calm (s)", "ratio");
  const double bytes = absl::GetFlag(FLAGS_gigabytes) * 1e9;
  const int count = std::max(1, static_cast<int>(bytes / static_cast<double>(8 * 512 * 2048)));
  const Model matrices{.matrices = {{.rows = 512, .cols = 2048, .count = count}}};
  const Model vector{.vector = static_cast<int64_t>(bytes / 12)};
  for (const auto& [name, model] : {std::pair("matrices", matrices), std::pair("adamw", vector)}) {
    if (!Contains(absl::GetFlag(FLAGS_models), name)) continue;
    const auto beside = SnapshotsBesideSteps(model, threads, absl::GetFlag(FLAGS_snapshots));
    if (!beside.ok()) return beside.status();
    const auto steps = static_cast<int>(beside->step_s.size());
    const double calm_sum_s = steps * beside->calm_step_s;
    // Steps that only read and write memory are there for comparison.
    const bool counts = !model.matrices.empty();
    std::printf("%11s %10.2f %10d %12.2f %8d %12.2f %12.2f %8.3f%s\n", name,
                static_cast<double>(model.state_bytes()) / 1e9, beside->snapshots,
                beside->snapshot_s, steps, beside->sum_s, calm_sum_s, beside->ratio(),
                !counts                   ? ""
                : beside->ratio() <= 1.10 ? ", wanted 1.10: holds"
                                          : ", wanted 1.10: MISSED");
    std::fflush(stdout);
    results["snapshot"].push_back({{"model", name},
                                   {"state_bytes", model.state_bytes()},
                                   {"snapshots", beside->snapshots},
                                   {"snapshot_s", beside->snapshot_s},
                                   {"step_s", beside->step_s},
                                   {"sum_s", beside->sum_s},
                                   {"calm_steps", beside->calm_steps},
                                   {"calm_step_s", beside->calm_step_s},
                                   {"ratio", beside->ratio()}});
  }
  return absl::OkStatus();
}

absl::Status Measure(json& results) {
  absl::Status status;
  if (Wanted("kills")) status = Kills(results);
  if (status.ok() && Wanted("calm")) status = CalmSteps(results);
  if (status.ok() && Wanted("snapshot")) status = Snapshots(results);
  return status;
}

}  // namespace
}  // namespace dmuond::bench

int main(int argc, char** argv) {
  return dmuond::bench::RunProgram({.name = "recovery_bench",
                                    .usage = "measures what it costs a job to survive",
                                    .measure = dmuond::bench::Measure,
                                    .train = dmuond::bench::RunTrainer},
                                   argc, argv);
}
