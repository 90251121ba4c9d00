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

// What a trainer process is told by the one that started it.
ABSL_FLAG(int32_t, trainer_rank, -1, "internal: be this trainer");
ABSL_FLAG(int32_t, trainers, 1, "internal");
ABSL_FLAG(std::string, address, "", "internal: the daemon's socket");
ABSL_FLAG(int64_t, rows, 1, "internal");
ABSL_FLAG(int64_t, cols, 1, "internal");
ABSL_FLAG(int32_t, matrices, 0, "internal");
ABSL_FLAG(int32_t, warmup, 1, "internal");
ABSL_FLAG(int32_t, measured, 1, "internal: steps");
ABSL_FLAG(std::string, results, "", "internal: where rank 0 writes what it measured");

namespace dmuond::bench {
namespace {

using client::Layout;
using client::LayoutBuilder;
using client::Route;
using client::Session;
using Clock = std::chrono::steady_clock;
using nlohmann::json;

absl::StatusOr<Layout> MakeLayout(const Scenario& scenario) {
  LayoutBuilder builder(scenario.trainers);
  if (scenario.matrices == 0) {
    builder.Add(
        {.name = "vector", .shape = {scenario.rows * scenario.cols}, .route = Route::kAdamW});
  }
  for (int i = 0; i < scenario.matrices; ++i) {
    builder.Add({.name = absl::StrCat("matrix", i), .shape = {scenario.rows, scenario.cols}});
  }
  return builder.Build();
}

void Fill(std::span<float> values, uint32_t seed) {
  uint32_t state = seed;
  for (float& value : values) {
    state = state * 1664525U + 1013904223U;
    value = static_cast<float>(static_cast<int32_t>(state)) * 1e-11F;
  }
}

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
  absl::StatusOr<Layout> layout = MakeLayout(scenario);
  if (!layout.ok()) return layout.status();
  absl::StatusOr<std::unique_ptr<Session>> session =
      Session::Open({.address = address, .rank = rank, .world_size = scenario.trainers});
  if (!session.ok()) return session.status();
  if (auto registered = (*session)->Register(*layout); !registered.ok()) {
    return registered.status();
  }
  if (absl::Status status = (*session)->Attach(); !status.ok()) return status;
  for (size_t i = 0; i < layout->parameters.size(); ++i) {
    const auto index = static_cast<int32_t>(i);
    Fill((*session)->Weight<float>(index), index);
    Fill((*session)->Gradient<float>(index), 1000 + index + rank);
  }
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

bool IsTrainer() { return absl::GetFlag(FLAGS_trainer_rank) >= 0; }

absl::Status RunTrainer() {
  const int32_t rank = absl::GetFlag(FLAGS_trainer_rank);
  const Scenario scenario{.rows = absl::GetFlag(FLAGS_rows),
                          .cols = absl::GetFlag(FLAGS_cols),
                          .matrices = absl::GetFlag(FLAGS_matrices),
                          .trainers = absl::GetFlag(FLAGS_trainers),
                          .steps = absl::GetFlag(FLAGS_measured),
                          .warmup = absl::GetFlag(FLAGS_warmup)};
  absl::StatusOr<json> measured = Train(scenario, absl::GetFlag(FLAGS_address), rank);
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
    auto trainer = testing::ChildProcess::Start(
        "step_bench",
        {absl::StrCat("--trainer_rank=", rank), absl::StrCat("--trainers=", scenario.trainers),
         absl::StrCat("--address=", (*daemon)->address()), absl::StrCat("--rows=", scenario.rows),
         absl::StrCat("--cols=", scenario.cols), absl::StrCat("--matrices=", scenario.matrices),
         absl::StrCat("--warmup=", scenario.warmup), absl::StrCat("--measured=", scenario.steps),
         absl::StrCat("--results=", results)});
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
