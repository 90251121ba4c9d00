// What a job has counted and measured on one node since it began there, for those who look at it.
// Values alone: a picture of the node has a copy.
//
//   figures.OnPublished(step, timing);
//   for (const TimeHistogram& phase : figures.phases) …
#ifndef DMUOND_SCHEDULER_JOB_JOB_FIGURES_H_
#define DMUOND_SCHEDULER_JOB_JOB_FIGURES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "dmuond/v1/types.pb.h"
#include "scheduler/step.h"
#include "scheduler/types.h"

namespace dmuond::scheduler {

// The parts of a step, as StepTiming has them.
inline constexpr std::array<const char*, 5> kPhaseNames = {"collect", "decide", "update", "publish",
                                                           "quiet"};
inline constexpr size_t kPhases = kPhaseNames.size();

// Times by their length.
struct TimeHistogram {
  // Upper ends of the buckets, seconds. What is longer lies behind the last one.
  static constexpr std::array<double, 19> kBounds = {1e-4,   2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2,
                                                     2.5e-2, 5e-2,   0.1,  0.25, 0.5,    1,    2.5,
                                                     5,      10,     25,   50,   100};

  void Add(double seconds);

  std::array<int64_t, kBounds.size() + 1> counts{};
  double sum_s = 0;
};

struct JobFigures {
  // The times of one published step, by phase.
  struct StepTimes {
    int64_t step = 0;
    std::array<float, kPhases> seconds{};
  };
  static constexpr size_t kRecentSteps = 120;

  // Every lane has published the step.
  void OnPublished(int64_t step, const v1::StepTiming& timing);
  // The attempt is open; it may have been before.
  void OnOpen(TimePoint now, Attempt attempt);
  // The last kRecentSteps, oldest first.
  [[nodiscard]] std::vector<StepTimes> RecentSteps() const;

  int64_t committed_steps = 0;
  int64_t skipped_steps = 0;
  int64_t aborted_attempts = 0;
  int64_t rollbacks = 0;
  double gradient_norm = 0;  // of the last decided step, before clipping
  double clip_coefficient = 1;
  std::optional<TimePoint> began;       // the first attempt was opened
  std::optional<TimePoint> progressed;  // a step was committed or skipped last
  Attempt open_attempt;
  std::optional<TimePoint> opened;  // since when it is open
  v1::StepTiming timing;            // of the newest attempt that every lane has published
  std::array<TimeHistogram, kPhases> phases;
  int64_t rail_bytes = 0;  // that this node's lanes have sent over their rails
  // Sums of squares of the gradients that this node's lanes own, of the last vote; null: none yet.
  std::shared_ptr<const std::vector<UnitNorm>> norms;
  // What the last step that all of them have published did to their matrices; null: none has yet.
  std::shared_ptr<const std::vector<UnitUpdate>> updates;
  std::optional<TimePoint> saved;  // a snapshot was completed last
  int64_t snapshots_written = 0;
  int64_t snapshots_failed = 0;
  int64_t snapshot_bytes = 0;  // that this node has written, of snapshots that came to nothing too
  // Of the newest snapshot, as the coordinator tells: of the whole, and how long it took.
  int64_t newest_snapshot_bytes = 0;
  int64_t newest_snapshot_ms = 0;
  TimeHistogram snapshot_times;  // from this node's order to write until the snapshot existed
  Attempt saving;                // names the snapshot that this node writes, or wrote last
  TimePoint saving_since;

 private:
  std::array<StepTimes, kRecentSteps> recent_{};
  size_t published_ = 0;  // steps
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_JOB_FIGURES_H_
