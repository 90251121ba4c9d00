// The coordinator's part in the snapshots of one job: when one is made, whether all nodes have
// written their files, and what its manifest says. Pure: time is passed in, messages come back.
//
//   every decision → OnDecision() → SaveState to all
//   SnapshotWritten of every node → WriteManifest to node 0
//   ManifestWritten → SnapshotDone to all
//
// Threads: one at a time.
#ifndef DMUOND_SCHEDULER_JOB_SNAPSHOT_ROUND_H_
#define DMUOND_SCHEDULER_JOB_SNAPSHOT_ROUND_H_

#include <cstdint>
#include <optional>
#include <set>
#include <string>

#include "dmuond/v1/peer.pb.h"
#include "scheduler/plan.h"
#include "scheduler/snapshot_schedule.h"

namespace dmuond::scheduler {

class SnapshotRound {
 public:
  // What a manifest says besides step, attempt and files. All must outlive the object.
  struct Job {
    const v1::PlanInputs* wire = nullptr;
    const PlanInputs* inputs = nullptr;
    const Plan* plan = nullptr;
  };
  // `durable`: the step that the job goes on from, if it comes from a snapshot. `counts`: what was
  // counted before the job went back to it.
  SnapshotRound(Job job, SnapshotOptions options, std::optional<StepId> durable, TimePoint now,
                SnapshotCounts counts = {})
      : job_(job), schedule_(options, durable, now, counts) {}

  // A commit or skip is about to be told, or a republish of the state under a new attempt; what
  // comes back follows it.
  [[nodiscard]] std::optional<v1::SaveState> OnDecision(TimePoint now,
                                                        const v1::Decision& decision);
  void OnRepublish(const v1::Republish& republish);
  // Somebody wants the state as it is now. `last`: nothing comes after it, the job ends.
  struct Answer {
    std::optional<v1::SaveState> save;
    std::optional<v1::SnapshotDone> done;  // at once, for who asked
  };
  [[nodiscard]] Answer OnRequest(TimePoint now, bool last = false);
  // Members may have missed what was said to them, and the coordinator what they said: once more.
  [[nodiscard]] std::optional<v1::SaveState> OnReformed() const;
  // A manifest, perhaps empty of files after an error, once every node has answered.
  [[nodiscard]] std::optional<v1::WriteManifest> OnWritten(const v1::SnapshotWritten& written);
  struct Finished {
    v1::SnapshotDone done;
    std::optional<v1::SaveState> save;  // somebody waits for another one
  };
  [[nodiscard]] std::optional<Finished> OnManifestWritten(TimePoint now,
                                                          const v1::ManifestWritten& written);

  [[nodiscard]] std::optional<StepId> durable_step() const { return schedule_.durable_step(); }
  [[nodiscard]] const SnapshotCounts& counts() const { return schedule_.counts(); }
  // One is being written, or will be as soon as that is.
  [[nodiscard]] bool busy() const { return writing_.has_value() || requested_; }

 private:
  struct Writing {
    SnapshotId id;
    std::set<int32_t> nodes;  // that have answered
    v1::SnapshotManifest manifest;
    std::string error;  // the first
    std::string reason;
  };
  [[nodiscard]] v1::SaveState Begin();
  [[nodiscard]] v1::SaveState SaveOf(const SnapshotId& id) const;
  [[nodiscard]] v1::SnapshotDone Done(const SnapshotId& id) const;
  // All that it says of the job besides its layout, which whoever writes it adds.
  void Describe(v1::SnapshotManifest& manifest) const;

  const Job job_;
  SnapshotSchedule schedule_;
  std::optional<SnapshotId> state_;    // what a snapshot now would be of
  std::optional<SnapshotId> durable_;  // made by this object
  std::optional<Writing> writing_;
  bool requested_ = false;  // another one, as soon as this is written
  bool last_ = false;
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_SNAPSHOT_ROUND_H_
