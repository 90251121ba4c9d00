#include "bench/step/scenario.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "dmuond/client/session.h"
#include "nlohmann/json.hpp"
#include "tests/client/daemon_process.h"

ABSL_FLAG(int32_t, warmup, 1, "internal");
ABSL_FLAG(int32_t, measured, 1, "internal: steps");
ABSL_FLAG(std::string, results, "", "internal: where rank 0 writes what it measured");

namespace dmuond::bench {
namespace {

using client::Layout;
using client::Session;
using Clock = std::chrono::steady_clock;
using nlohmann::json;

json ToJson(const client::StepTiming& timing) {
  return {{"collect_us", timing.collect_us}, {"decide_us", timing.decide_us},
          {"update_us", timing.update_us},   {"publish_us", timing.publish_us},
          {"quiet_us", timing.quiet_us},     {"sum_us", timing.sum_us},
          {"sum_bytes", timing.sum_bytes},   {"norm_us", timing.norm_us},
          {"copy_us", timing.copy_us},       {"copy_bytes", timing.copy_bytes}};
}

client::StepTiming TimingFromJson(const json& timing) {
  return {.collect_us = timing["collect_us"],
          .decide_us = timing["decide_us"],
          .update_us = timing["update_us"],
          .publish_us = timing["publish_us"],
          .quiet_us = timing["quiet_us"],
          .sum_us = timing["sum_us"],
          .sum_bytes = timing["sum_bytes"],
          .norm_us = timing["norm_us"],
          .copy_us = timing["copy_us"],
          .copy_bytes = timing["copy_bytes"]};
}

absl::StatusOr<json> Train(const Scenario& scenario, const std::string& address, int32_t rank) {
  absl::StatusOr<Layout> layout = MakeLayout(scenario.model, scenario.trainers);
  if (!layout.ok()) return layout.status();
  absl::StatusOr<std::unique_ptr<Session>> session =
      Session::Open({.address = address, .rank = rank, .world_size = scenario.trainers});
  if (!session.ok()) return session.status();
  if (auto registered = (*session)->Register(*layout); !registered.ok()) {
    return registered.status();
  }
  if (absl::Status status = (*session)->Attach(); !status.ok()) return status;
  FillWeights(**session, scenario.model);
  FillGradients(**session, scenario.model, rank);
  if (absl::Status status = (*session)->Push(); !status.ok()) return status;
  const client::StepScalars scalars{.groups = {{.learning_rate = 1e-3}}};
  json measured;
  for (int step = -scenario.warmup; step < scenario.steps; ++step) {
    const Clock::time_point begin = Clock::now();
    absl::StatusOr<client::Outcome> outcome = (*session)->Step(scalars);
    const Clock::time_point end = Clock::now();
    if (!outcome.ok()) return outcome.status();
    if (step < 0) continue;
    measured["step_us"].push_back(std::chrono::duration<double, std::micro>(end - begin).count());
    // A step's answer carries the timing of the one before.
    if (step > 0) measured["timings"].push_back(ToJson((*session)->last_timing()));
  }
  if (absl::Status status = (*session)->Close(); !status.ok()) return status;
  return measured;
}

absl::StatusOr<Measured> ReadResults(const std::string& path) {
  std::ifstream file(path);
  const json results = json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!results.is_object()) return absl::DataLossError(absl::StrCat(path, " holds no results"));
  Measured measured;
  measured.step_us = results["step_us"].get<std::vector<double>>();
  std::sort(measured.step_us.begin(), measured.step_us.end());
  for (const json& timing : results.value("timings", json::array())) {
    measured.timings.push_back(TimingFromJson(timing));
  }
  return measured;
}

}  // namespace

double Measured::Percentile(double q) const {
  const auto index = static_cast<size_t>(q * static_cast<double>(step_us.size()));
  return step_us[std::min(index, step_us.size() - 1)];
}

absl::Status RunTrainer(int32_t rank) {
  const Scenario scenario{.model = ModelOfFlags(),
                          .trainers = TrainersOfFlags(),
                          .steps = absl::GetFlag(FLAGS_measured),
                          .warmup = absl::GetFlag(FLAGS_warmup)};
  absl::StatusOr<json> measured = Train(scenario, AddressOfFlags(), rank);
  if (!measured.ok()) return measured.status();
  if (rank != 0) return absl::OkStatus();
  std::ofstream file(absl::GetFlag(FLAGS_results));
  file << *measured;
  file.close();
  return file ? absl::OkStatus() : absl::InternalError("results cannot be written");
}

absl::StatusOr<Measured> Run(const Scenario& scenario) {
  auto daemon =
      testing::DaemonProcess::Start({.devices = absl::StrCat("cpu:", scenario.lanes),
                                     .flags = {absl::StrCat("--threads=", scenario.threads)}});
  if (!daemon.ok()) return daemon.status();
  const std::string results = absl::StrCat((*daemon)->address(), ".results");
  std::vector<std::unique_ptr<testing::ChildProcess>> trainers;
  for (int32_t rank = 0; rank < scenario.trainers; ++rank) {
    std::vector<std::string> flags =
        TrainerFlags(rank, scenario.trainers, (*daemon)->address(), scenario.model);
    flags.push_back(absl::StrCat("--warmup=", scenario.warmup));
    flags.push_back(absl::StrCat("--measured=", scenario.steps));
    flags.push_back(absl::StrCat("--results=", results));
    auto trainer = testing::ChildProcess::Start("step_bench", std::move(flags));
    if (!trainer.ok()) return trainer.status();
    trainers.push_back(*std::move(trainer));
  }
  for (size_t rank = 0; rank < trainers.size(); ++rank) {
    if (const int code = trainers[rank]->Wait(std::chrono::hours(1)); code != 0) {
      return absl::InternalError(absl::StrCat("trainer ", rank, " ended with ", code,
                                              "; the daemon's log:\n", (*daemon)->Log()));
    }
  }
  return ReadResults(results);
}

}  // namespace dmuond::bench
