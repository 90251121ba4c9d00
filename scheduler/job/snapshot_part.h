// One node's part in the snapshots of a job: what it was told to save, what has come of that, and
// which step is durable. Pure: as its answers say, lanes copy and a thread writes the files. Both
// happen at the same time, and so are one state, Writing.
//
//               save          written    hangs      done       goes back
//   Idle        Writing (1)   -          -          -          Idle
//   Writing     Writing (2)   Answered   Answered   -          Idle
//   Answered    Answered (3)  -          -          Idle (4)   Idle
//
// "-": ignored, because the disk's thread may be late, and the coordinator tells all nodes. (1) The
// next state is Answered if the disk hangs. (2) If the order is for the same snapshot, it goes on.
// If it is for another one, the coordinator has given this one up, and the other one is written.
// (3) If the order is for the same snapshot, the answer is told again. (4) Only if this snapshot
// has failed: then the same state may be ordered again, and is written again. Else it stays
// Answered.
#ifndef DMUOND_SCHEDULER_JOB_SNAPSHOT_PART_H_
#define DMUOND_SCHEDULER_JOB_SNAPSHOT_PART_H_

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "dmuond/v1/peer.pb.h"
#include "dmuond/v1/record.pb.h"
#include "dmuond/v1/snapshot.pb.h"
#include "scheduler/types.h"

namespace dmuond::scheduler {

class SnapshotPart {
 public:
  enum class State : uint8_t { kIdle, kWriting, kAnswered };

  explicit SnapshotPart(int32_t node = 0) : node_(node) {}
  // A part that goes on where the one that wrote `record` has stopped. INVALID_ARGUMENT: no
  // SnapshotPart has written it.
  [[nodiscard]] static absl::StatusOr<SnapshotPart> FromRecord(int32_t node,
                                                               const v1::RecordedSnapshot& record);
  void ToRecord(v1::RecordedSnapshot& record) const;
  // Grows when its record may have changed.
  [[nodiscard]] uint32_t version() const { return version_; }

  [[nodiscard]] State state() const { return state_; }
  [[nodiscard]] uint64_t attempt() const { return attempt_; }  // names the snapshot; 0: none yet
  // The newest step of which a snapshot exists.
  [[nodiscard]] std::optional<int64_t> durable_step() const { return durable_step_; }
  void set_durable_step(int64_t step) {
    durable_step_ = step;
    ++version_;
  }
  // The last snapshot that was completed or has failed, and how many there have been.
  [[nodiscard]] const v1::SnapshotDone& done() const { return done_; }
  [[nodiscard]] uint64_t times_done() const { return times_done_; }
  // Why the newest snapshot failed; empty: it exists, or there is none.
  [[nodiscard]] std::string failure() const {
    return done_.reason() == "JOB_HAS_NO_STATE" ? "" : done_.error();
  }
  // The state that `attempt` has made is in a snapshot.
  [[nodiscard]] bool Saved(uint64_t attempt) const {
    return attempt != 0 && saved_attempt_ == attempt;
  }

  // What this node can do for a snapshot.
  struct Able {
    bool lanes_ready = false;
    uint64_t applied_attempt = 0;  // whose state the lanes have
    std::string disk_hangs;        // how it hangs; empty: it does not
  };
  // Files are to be written. `abandoned` says why lanes cannot copy, and so why the snapshot fails;
  // empty: lanes are to copy.
  struct Write {
    std::string abandoned;
  };
  using Order = std::variant<std::monostate, Write, v1::SnapshotWritten>;
  [[nodiscard]] Order OnSave(const v1::SaveState& save, const Able& able);
  // The snapshot must not exist, because weights in it are infinite or NaN.
  void OnNonFinite(uint64_t attempt, std::string what);
  // The disk's thread has finished; a non-empty `error` says why it has failed. Returns what the
  // coordinator is to be told; nullopt: it has an answer already.
  [[nodiscard]] std::optional<v1::SnapshotWritten> OnWritten(
      uint64_t attempt, const std::vector<v1::SnapshotFile>& files, const std::string& error);
  // The directory hangs: the snapshot that is being written counts as failed from now on.
  [[nodiscard]] std::optional<v1::SnapshotWritten> OnDiskHangs(const std::string& how);
  // The snapshot is in the directory: it was completed, whether that was heard or not.
  void OnSeen(const SnapshotId& id) {
    saved_attempt_ = id.attempt.value();
    durable_step_ = id.step.value();
    ++version_;
  }
  // True: it is the snapshot that this node has answered for.
  bool OnDone(const v1::SnapshotDone& done);
  // The state that attempt `before` has made counts as that of `attempt` from now on.
  // `from_snapshot`: it is the state of the snapshot that the job begins from.
  void OnRepublished(uint64_t before, uint64_t attempt, bool from_snapshot);
  // The job goes back: no snapshot of its former state is wanted any more.
  void GoBack();

 private:
  [[nodiscard]] v1::SnapshotWritten Answer(const std::string& error, const std::string& reason);

  int32_t node_;
  State state_ = State::kIdle;
  uint64_t attempt_ = 0;
  std::string non_finite_;
  v1::SnapshotWritten answer_;
  std::optional<int64_t> durable_step_;
  v1::SnapshotDone done_;
  uint64_t times_done_ = 0;
  uint64_t saved_attempt_ = 0;
  uint32_t version_ = 0;
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_SNAPSHOT_PART_H_
