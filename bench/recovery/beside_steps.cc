#include "bench/recovery/beside_steps.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/recovery/group.h"

namespace dmuond::bench {
namespace {

constexpr int kCalmBetween = 3;

double Seconds(int64_t nanoseconds) { return static_cast<double>(nanoseconds) / 1e9; }

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

absl::StatusOr<BesideSteps> SnapshotsBesideSteps(const Model& model, int threads, int snapshots) {
  // None falls due by itself.
  auto group = Group::Start(1, "cpu:1",
                            {absl::StrCat("--threads=", threads), "--snapshot_dir",
                             "--snapshot_every_steps=0", "--snapshot_every=0s"});
  if (!group.ok()) return group.status();
  const absl::Status begun = (*group)->StartTrainer({.model = model});
  if (!begun.ok()) return begun;
  const Trainer& trainer = (*group)->trainer(0);
  std::vector<std::pair<int64_t, int64_t>> meanwhile;
  for (int i = 0; i <= snapshots; ++i) {
    for (int calm = 0; calm < kCalmBetween; ++calm) {
      const absl::StatusOr<Record> step = trainer.WaitForStepAfter(Now());
      if (!step.ok()) return step.status();
    }
    if (i == snapshots) break;
    const int64_t asked = Now();
    const absl::StatusOr<int64_t> saved = (*group)->Save(0);
    if (!saved.ok()) return saved.status();
    meanwhile.emplace_back(asked, Now());
  }
  BesideSteps result{.snapshots = snapshots};
  std::vector<double> calm;
  std::vector<double> took;
  took.reserve(meanwhile.size());
  for (const auto& [from, to] : meanwhile) took.push_back(Seconds(to - from));
  const std::vector<Record> records = trainer.Records();
  for (size_t i = 2; i < records.size(); ++i) {  // the session, and a step that warms up
    const Record& step = records[i];
    const bool beside = std::any_of(meanwhile.begin(), meanwhile.end(), [&](const auto& snapshot) {
      return step.begin < snapshot.second && step.end > snapshot.first;
    });
    if (beside) {
      result.step_s.push_back(Seconds(step.end - step.begin));
      result.sum_s += result.step_s.back();
    } else {
      calm.push_back(Seconds(step.end - step.begin));
    }
  }
  result.calm_steps = static_cast<int>(calm.size());
  result.calm_step_s = Median(calm);
  result.snapshot_s = Median(took);
  if (result.step_s.empty() || calm.empty()) return absl::InternalError("too few steps");
  return result;
}

}  // namespace dmuond::bench
