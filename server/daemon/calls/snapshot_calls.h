// Snapshots on request: SaveSnapshot and LoadSnapshot of trainers, SaveJob and LoadJob of
// operators.
//
// Threads: any; they block.
#ifndef DMUOND_SERVER_DAEMON_CALLS_SNAPSHOT_CALLS_H_
#define DMUOND_SERVER_DAEMON_CALLS_SNAPSHOT_CALLS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/v1/admin.pb.h"
#include "dmuond/v1/trainer.pb.h"
#include "server/daemon/core.h"

namespace dmuond::server {

class SnapshotCalls {
 public:
  explicit SnapshotCalls(Core& core) : core_(core) {}

  absl::StatusOr<v1::SaveSnapshotReply> SaveSnapshot(const v1::SaveSnapshotRequest& request,
                                                     const Core::Cancelled& cancelled);
  absl::StatusOr<v1::LoadSnapshotReply> LoadSnapshot(const v1::LoadSnapshotRequest& request,
                                                     const Core::Cancelled& cancelled);
  absl::StatusOr<v1::SaveJobReply> SaveJob(const Core::Cancelled& cancelled);
  // The running job goes back to the snapshot of a step; 0: the newest.
  absl::StatusOr<v1::LoadJobReply> LoadJob(const v1::LoadJobRequest& request,
                                           const Core::Cancelled& cancelled);

 private:
  // A job that goes on from a snapshot may not have begun, perhaps for want of trainers. The caller
  // waits until it has, or lets it go back all the same. A trainer waits: it helps to begin the
  // job.
  enum class NotBegun : uint8_t { kWait, kGoBack };
  // The snapshot that the job can go back to: it was read as a whole, and the group is there.
  // ROLLED_BACK if the job goes back meanwhile. Gives up the lock.
  absl::StatusOr<storage::SnapshotId> FindSnapshot(int64_t step, NotBegun not_begun,
                                                   const Core::Cancelled& cancelled)
      DMUOND_REQUIRES(core_.mutex);
  // Asks the group to go back, and returns where to. REQUIRES: FindSnapshot() has found it.
  scheduler::Rollback TellGoBack(const storage::SnapshotId& to, const std::string& why)
      DMUOND_REQUIRES(core_.mutex);
  // Waits until this node has heard of the rollback `told`, or it is known that none comes of it.
  absl::StatusOr<int64_t> WaitUntilBack(const scheduler::Rollback& told,
                                        const Core::Cancelled& cancelled)
      DMUOND_REQUIRES(core_.mutex);
  // The error for a caller whose job has gone back to another step than it wanted. REQUIRES: it
  // has.
  [[nodiscard]] absl::Status WentElsewhere() const DMUOND_REQUIRES(core_.mutex);
  // One caller's part in a LoadSnapshot, which may be repeated meanwhile.
  absl::StatusOr<int64_t> LoadOnce(const v1::LoadSnapshotRequest& request,
                                   const Core::Cancelled& cancelled) DMUOND_REQUIRES(core_.mutex);
  [[nodiscard]] std::string PathOf(const v1::SnapshotDone& done) const DMUOND_REQUIRES(core_.mutex);

  Core& core_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_SNAPSHOT_CALLS_H_
