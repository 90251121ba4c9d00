// One node's part in the snapshots of a job: what it has been told to save, what has come of it,
// and what is durable. Pure; lanes copy, and a thread for the disk writes, as its answers say.
// Lanes copy while the files are written, so that both are one state.
//
//               save          written    hangs      done       goes back
//   Idle        Writing (1)   -          -          -          Idle
//   Writing     Writing (2)   Answered   Answered   -          Idle
//   Answered    Answered (3)  -          -          Idle (4)   Idle
//
// "-": ignored: the disk's thread may be late, and the coordinator tells everybody.
// (1) Answered at once where the disk hangs. (2) Of the same snapshot: it goes on. Of another one:
// the coordinator has given this one up, and the other one is written. (3) Of the same snapshot:
// the answer is told again. (4) Of this one, if it has failed: the same state may be asked for
// again, and then is written again. A done snapshot of this attempt that succeeded stays answered.
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

namespace dmuond::scheduler {

class SnapshotPart {
 public:
  enum class State : uint8_t { kIdle, kWriting, kAnswered };

  explicit SnapshotPart(int32_t node = 0) : node_(node) {}
  // What another one has come to. INVALID_ARGUMENT: no SnapshotPart has written it.
  [[nodiscard]] static absl::StatusOr<SnapshotPart> FromRecord(int32_t node,
                                                               const v1::RecordedSnapshot& record);
  void ToRecord(v1::RecordedSnapshot& record) const;
  // Grows with everything that a record of it would say otherwise.
  [[nodiscard]] uint32_t version() const { return version_; }

  [[nodiscard]] State state() const { return state_; }
  [[nodiscard]] uint64_t attempt() const { return attempt_; }  // names the snapshot; 0: none yet
  // Newest step in a snapshot that exists.
  [[nodiscard]] std::optional<int64_t> durable_step() const { return durable_step_; }
  void set_durable_step(int64_t step) {
    durable_step_ = step;
    ++version_;
  }
  // The last that existed or failed, and how many there have been.
  [[nodiscard]] const v1::SnapshotDone& done() const { return done_; }
  [[nodiscard]] uint64_t times_done() const { return times_done_; }
  // The state that `attempt` has made is in a snapshot.
  [[nodiscard]] bool Saved(uint64_t attempt) const {
    return attempt != 0 && saved_attempt_ == attempt;
  }

  // What this node can do for a snapshot.
  struct Able {
    bool lanes_ready = false;
    uint64_t applied_attempt = 0;  // whose state the lanes have
    std::string disk_hangs;        // how; empty: it does not
  };
  // Files are to be written. `abandoned`: why lanes cannot copy, in which case nothing comes of it;
  // empty: they are to begin.
  struct Write {
    std::string abandoned;
  };
  using Order = std::variant<std::monostate, Write, v1::SnapshotWritten>;
  [[nodiscard]] Order OnSave(const v1::SaveState& save, const Able& able);
  // Weights that are copied for it are infinite or NaN: it must not exist.
  void OnNonFinite(uint64_t attempt, std::string what);
  // The disk's thread is done with it; a non-empty error says that nothing came of it. What the
  // coordinator is to be told; nullopt: it was told something else already.
  [[nodiscard]] std::optional<v1::SnapshotWritten> OnWritten(
      uint64_t attempt, const std::vector<v1::SnapshotFile>& files, const std::string& error);
  // The directory hangs: whatever becomes of what is being written there, it has failed here.
  [[nodiscard]] std::optional<v1::SnapshotWritten> OnDiskHangs(const std::string& how);
  // True: it is the one that this node has written, or has failed to.
  bool OnDone(const v1::SnapshotDone& done);
  // The state as `before` had made it is that of another attempt now; `from_snapshot`: it is that
  // of the snapshot that the job has gone on from.
  void OnRepublished(uint64_t before, uint64_t attempt, bool from_snapshot);
  // The job goes back: nothing of what it had is wanted any more.
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
