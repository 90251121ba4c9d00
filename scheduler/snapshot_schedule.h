// Decides when a snapshot is made. The coordinator asks after each decision that consumes a step,
// and sends the answer along with the decision. Pure; time is passed in.
//
//   if (schedule.OnCommitted(step, now)) …save the state after `step`…
//   schedule.OnFinished(durable, now);
#ifndef DMUOND_SCHEDULER_SNAPSHOT_SCHEDULE_H_
#define DMUOND_SCHEDULER_SNAPSHOT_SCHEDULE_H_

#include <chrono>
#include <compare>
#include <cstdint>
#include <optional>

#include "scheduler/step.h"
#include "scheduler/types.h"

namespace dmuond::scheduler {

struct SnapshotOptions {
  int64_t every_steps = 500;                 // 0: not by steps
  std::chrono::milliseconds every{600'000};  // 0: not by time
};

// How many snapshots of a job were due and do not exist.
struct SnapshotCounts {
  int64_t left_out = 0;  // fell due while another one was being written
  int64_t failed = 0;
};

// A job that goes back to a snapshot begins a new schedule, with the counts of the one before.
class SnapshotSchedule {
 public:
  // `durable`: the step that the job goes on from, if it comes from a snapshot.
  SnapshotSchedule(SnapshotOptions options, std::optional<StepId> durable, TimePoint now,
                   SnapshotCounts counts = {})
      : options_(options),
        durable_(durable),
        counts_(counts),
        due_step_(NextAfter(durable)),
        due_(now + options.every) {}

  // A step is committed or skipped. True: its state is to be saved, and OnFinished() will tell how
  // that went. One that falls due while the last is being written is left out and counted; the
  // next one falls due as if it had been made.
  [[nodiscard]] bool OnCommitted(StepId step, TimePoint now);
  // Somebody asks for a snapshot: the next step's will be made, or the one after the snapshot that
  // is being written.
  void Request() { requested_ = true; }
  // The snapshot that was begun is durable, or has failed. A failed one is not repeated at once:
  // its cause, a full disk say, is likely still there.
  void OnFinished(bool durable);

  [[nodiscard]] std::optional<StepId> durable_step() const { return durable_; }
  [[nodiscard]] const SnapshotCounts& counts() const { return counts_; }

 private:
  [[nodiscard]] int64_t NextAfter(std::optional<StepId> step) const {
    return (step.has_value() ? step->value() : 0) + options_.every_steps;
  }

  SnapshotOptions options_;
  std::optional<StepId> durable_;
  SnapshotCounts counts_;
  std::optional<StepId> writing_;
  int64_t due_step_;
  TimePoint due_;
  bool requested_ = false;
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_SNAPSHOT_SCHEDULE_H_
