// The coordinator's part in the snapshots of one job: it decides when one is made, knows whether
// all nodes have written their files, and says what the manifest holds. Pure: time is passed in,
// and messages are returned.
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
  // What goes into a manifest beside step, attempt and files. All must outlive the object.
  struct Job {
    const v1::PlanInputs* wire = nullptr;
    const PlanInputs* inputs = nullptr;
    const Plan* plan = nullptr;
  };
  // `durable` is the step that the job begins from, if it begins from a snapshot. `counts` is what
  // was counted before the job went back.
  SnapshotRound(Job job, SnapshotOptions options, std::optional<StepId> durable, TimePoint now,
                SnapshotCounts counts = {})
      : job_(job),
        schedule_(options, durable, now, counts),
        durable_changes_(durable.has_value() ? 0 : -1) {}

  // A decision, or a republish of the state under a new attempt, is about to be told. What is
  // returned is to be told after it.
  [[nodiscard]] std::optional<v1::SaveState> OnDecision(TimePoint now,
                                                        const v1::Decision& decision);
  void OnRepublish(const v1::Republish& republish);
  // Somebody wants a snapshot of the present state. `last`: the job ends after it.
  struct Answer {
    std::optional<v1::SaveState> save;
    std::optional<v1::SnapshotDone> done;  // an answer at once, to the node that has asked
  };
  [[nodiscard]] Answer OnRequest(TimePoint now, bool last = false);
  // Lanes or links are new: messages of the snapshot that is being written may be lost, and it is
  // ordered once more.
  [[nodiscard]] std::optional<v1::SaveState> OnReformed() const;
  // The job ends when what is being written, or is to follow, exists: told once more, nodes learn
  // it.
  [[nodiscard]] std::optional<v1::SaveState> OnEnd() {
    last_ = true;
    return OnReformed();
  }
  // Returns the manifest once every node has answered; after an error it has no files.
  [[nodiscard]] std::optional<v1::WriteManifest> OnWritten(TimePoint now,
                                                           const v1::SnapshotWritten& written);
  struct Finished {
    v1::SnapshotDone done;
    std::optional<v1::SaveState> save;  // begins the next one, if somebody waits for one
  };
  [[nodiscard]] std::optional<Finished> OnManifestWritten(TimePoint now,
                                                          const v1::ManifestWritten& written);

  [[nodiscard]] std::optional<StepId> durable_step() const { return schedule_.durable_step(); }
  [[nodiscard]] const SnapshotCounts& counts() const { return schedule_.counts(); }
  // Which one is being written; where none is, the newest state.
  [[nodiscard]] Attempt writing() const {
    if (writing_.has_value()) return writing_->id.attempt;
    return state_.value_or(SnapshotId{}).attempt;
  }
  // A snapshot that exists has all of the state.
  [[nodiscard]] bool has_newest() const { return changes_ == durable_changes_; }
  // A snapshot is being written, or another one is to follow it.
  [[nodiscard]] bool busy() const { return writing_.has_value() || requested_; }

 private:
  struct Writing {
    SnapshotId id;
    TimePoint since;
    int64_t changes = 0;      // that its state has
    std::set<int32_t> nodes;  // those that have answered
    v1::SnapshotManifest manifest;
    v1::SnapshotDone costs;  // bytes and took_ms, once all files are durable
    std::string error;       // the first
    std::string reason;
  };
  [[nodiscard]] v1::SaveState Begin(TimePoint now);
  [[nodiscard]] v1::SaveState SaveOf(const SnapshotId& id) const;
  [[nodiscard]] v1::SnapshotDone Done(const SnapshotId& id) const;
  // Fills in all that the manifest says of the job but its layout, which its writer adds.
  void Describe(v1::SnapshotManifest& manifest) const;

  const Job job_;
  SnapshotSchedule schedule_;
  std::optional<SnapshotId> state_;    // the present state
  std::optional<SnapshotId> durable_;  // the newest snapshot that this object has had made
  std::optional<Writing> writing_;
  int64_t changes_ = 0;      // of the state, by steps, pushes and loads
  int64_t durable_changes_;  // that a snapshot has; -1: there is none
  bool requested_ = false;   // another one is to follow
  bool last_ = false;
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_SNAPSHOT_ROUND_H_
