#include "bench/step/scenario.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dmuond/client/session.h"
#include "tests/client/daemon_process.h"

namespace dmuond::bench {
namespace {

using client::Layout;
using client::LayoutBuilder;
using client::Route;
using client::Session;
using Clock = std::chrono::steady_clock;

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

absl::Status Train(const Scenario& scenario, const std::string& address, int32_t rank,
                   Measured& measured) {
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
  for (int step = -scenario.warmup; step < scenario.steps; ++step) {
    const Clock::time_point begin = Clock::now();
    absl::StatusOr<client::Outcome> outcome = (*session)->Step(scalars);
    const Clock::time_point end = Clock::now();
    if (!outcome.ok()) return outcome.status();
    if (rank != 0 || step < 0) continue;
    measured.step_us.push_back(std::chrono::duration<double, std::micro>(end - begin).count());
    // A step's answer carries the timing of the one before.
    if (step > 0) measured.timings.push_back((*session)->last_timing());
  }
  return (*session)->Close();
}

}  // namespace

double Measured::Percentile(double q) const {
  const auto index = static_cast<size_t>(q * static_cast<double>(step_us.size()));
  return step_us[std::min(index, step_us.size() - 1)];
}

absl::StatusOr<Measured> Run(const Scenario& scenario) {
  auto daemon =
      testing::DaemonProcess::Start({.devices = absl::StrCat("cpu:", scenario.lanes),
                                     .flags = {absl::StrCat("--threads=", scenario.threads)}});
  if (!daemon.ok()) return daemon.status();
  Measured measured;
  std::vector<absl::Status> results(scenario.trainers);
  std::vector<std::thread> trainers;
  for (int32_t rank = 0; rank < scenario.trainers; ++rank) {
    trainers.emplace_back(
        [&, rank] { results[rank] = Train(scenario, (*daemon)->address(), rank, measured); });
  }
  for (std::thread& trainer : trainers) trainer.join();
  for (const absl::Status& result : results) {
    if (!result.ok()) return result;
  }
  std::sort(measured.step_us.begin(), measured.step_us.end());
  return measured;
}

}  // namespace dmuond::bench
