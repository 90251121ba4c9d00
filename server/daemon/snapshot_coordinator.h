// The coordinator's part in the snapshots of one job: when one is made, whether all nodes have
// written their files, and what its manifest says. Pure: time is passed in, messages come back.
//
//   every decision → OnDecision() → SaveState to all
//   SnapshotWritten of every node → WriteManifest to node 0
//   ManifestWritten → SnapshotDone to all
//
// Threads: one at a time.
#ifndef DMUOND_SERVER_DAEMON_SNAPSHOT_COORDINATOR_H_
#define DMUOND_SERVER_DAEMON_SNAPSHOT_COORDINATOR_H_

#include <cstdint>
#include <optional>
#include <set>
#include <string>

#include "dmuond/v1/peer.pb.h"
#include "scheduler/plan.h"
#include "scheduler/snapshot_schedule.h"
#include "server/storage/snapshot_name.h"

namespace dmuond::server {

class SnapshotCoordinator {
 public:
  // What a manifest says besides step, attempt and files. All must outlive the object.
  struct Job {
    const v1::PlanInputs* wire = nullptr;
    const scheduler::PlanInputs* inputs = nullptr;
    const scheduler::Plan* plan = nullptr;
  };
  // `durable`: the step that the job goes on from, if it comes from a snapshot.
  SnapshotCoordinator(Job job, scheduler::SnapshotOptions options,
                      std::optional<scheduler::StepId> durable, scheduler::TimePoint now)
      : job_(job), schedule_(options, durable, now) {}

  // A commit or skip is about to be told, or a republish of the state under a new attempt; what
  // comes back follows it.
  [[nodiscard]] std::optional<v1::SaveState> OnDecision(scheduler::TimePoint now,
                                                        const v1::Decision& decision);
  void OnRepublish(const v1::Republish& republish);
  // Somebody wants the state as it is now. `last`: nothing comes after it, the job ends.
  struct Answer {
    std::optional<v1::SaveState> save;
    std::optional<v1::SnapshotDone> done;  // at once, for who asked
  };
  [[nodiscard]] Answer OnRequest(scheduler::TimePoint now, bool last = false);
  // Members may have missed what was said to them, and the coordinator what they said: once more.
  [[nodiscard]] std::optional<v1::SaveState> OnReformed() const;
  // A manifest, perhaps empty of files after an error, once every node has answered.
  [[nodiscard]] std::optional<v1::WriteManifest> OnWritten(const v1::SnapshotWritten& written);
  struct Finished {
    v1::SnapshotDone done;
    std::optional<v1::SaveState> save;  // somebody waits for another one
  };
  [[nodiscard]] std::optional<Finished> OnManifestWritten(scheduler::TimePoint now,
                                                          const v1::ManifestWritten& written);

  [[nodiscard]] std::optional<scheduler::StepId> durable_step() const {
    return schedule_.durable_step();
  }
  // One is being written, or will be as soon as that is.
  [[nodiscard]] bool busy() const { return writing_.has_value() || requested_; }

 private:
  struct Writing {
    storage::SnapshotId id;
    std::set<int32_t> nodes;  // that have answered
    v1::SnapshotManifest manifest;
    std::string error;  // the first
    std::string reason;
  };
  [[nodiscard]] v1::SaveState Begin();
  [[nodiscard]] v1::SaveState SaveOf(const storage::SnapshotId& id) const;
  [[nodiscard]] v1::SnapshotDone Done(const storage::SnapshotId& id) const;
  [[nodiscard]] std::string Describe(v1::SnapshotManifest& manifest) const;

  const Job job_;
  scheduler::SnapshotSchedule schedule_;
  std::optional<storage::SnapshotId> state_;    // what a snapshot now would be of
  std::optional<storage::SnapshotId> durable_;  // made by this object
  std::optional<Writing> writing_;
  bool requested_ = false;  // another one, as soon as this is written
  bool last_ = false;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_SNAPSHOT_COORDINATOR_H_
