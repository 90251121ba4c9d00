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
  // The snapshot that the job can go back to, read whole, when the group is there to do so.
  // ROLLED_BACK where it goes back meanwhile. Gives up the lock.
  absl::StatusOr<int64_t> FindSnapshot(int64_t step, const Core::Cancelled& cancelled)
      DMUOND_REQUIRES(core_.mutex);
  // Has the group go back; the step that it is told to go to. REQUIRES: it is settled.
  scheduler::Rollback TellGoBack(int64_t step, const std::string& why) DMUOND_REQUIRES(core_.mutex);
  // Until this node's trainers are told so, or it is known that they are not.
  absl::StatusOr<int64_t> WaitUntilBack(const scheduler::Rollback& told,
                                        const Core::Cancelled& cancelled)
      DMUOND_REQUIRES(core_.mutex);
  // For who wanted the job to go back, and not to where it is. REQUIRES: it has gone back.
  [[nodiscard]] absl::Status WentElsewhere() const DMUOND_REQUIRES(core_.mutex);
  // One caller's part in a LoadSnapshot, which may be repeated meanwhile.
  absl::StatusOr<int64_t> LoadOnce(const v1::LoadSnapshotRequest& request,
                                   const Core::Cancelled& cancelled) DMUOND_REQUIRES(core_.mutex);
  [[nodiscard]] std::string PathOf(const v1::SnapshotDone& done) const DMUOND_REQUIRES(core_.mutex);

  Core& core_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_SNAPSHOT_CALLS_H_
