// AttachBuffers makes a trainer's arenas and timeline or keeps those that it had, hands them out,
// and has the lanes map them. By AckRollback a trainer says that they may be written again.
//
// Threads: any; they block.
#ifndef DMUOND_SERVER_DAEMON_CALLS_ATTACH_CALLS_H_
#define DMUOND_SERVER_DAEMON_CALLS_ATTACH_CALLS_H_

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/v1/attach.pb.h"
#include "dmuond/v1/trainer.pb.h"
#include "server/daemon/core.h"

namespace dmuond::server {

class AttachCalls {
 public:
  explicit AttachCalls(Core& core) : core_(core) {}

  absl::StatusOr<v1::AttachBuffersReply> AttachBuffers(const v1::AttachBuffersRequest& request,
                                                       const Core::Cancelled& cancelled);
  absl::StatusOr<v1::AckRollbackReply> AckRollback(const v1::AckRollbackRequest& request,
                                                   const Core::Cancelled& cancelled);

 private:
  // Descriptors of a trainer's memory. JobMemory owns them.
  struct TrainerMemory {
    struct Arena {
      int fd = -1;
      bool kept = false;
    };
    std::vector<Arena> arenas;  // as in the request
    int timeline = -1;
  };
  absl::StatusOr<v1::AttachBuffersReply> AttachOnce(const v1::AttachBuffersRequest& request)
      DMUOND_REQUIRES(core_.mutex);
  // Waits until lanes can map the session's memory, and publish nothing to what they have mapped.
  absl::Status WaitUntilMappable(const v1::SessionKey& key) DMUOND_REQUIRES(core_.mutex);
  // Gives the lock up meanwhile: session and job may have ended when it returns. REQUIRES: the
  // session and the job's memory exist.
  absl::StatusOr<TrainerMemory> Allocate(const v1::AttachBuffersRequest& request, uint32_t buckets)
      DMUOND_REQUIRES(core_.mutex);
  // Sends the descriptors to the trainer by its attach connection, and adds the memory to the
  // lanes' command.
  absl::Status HandOut(const v1::AttachBuffersRequest& request, const TrainerMemory& memory,
                       v1::LaneCommand::AttachTrainer& attach) DMUOND_REQUIRES(core_.mutex);
  // Sends on the session's attach connection. If that has ended, waits until the session has ended
  // with it, and returns the error that every call for such a session gets.
  absl::Status SendToTrainer(const v1::SessionKey& key, const v1::AttachFrame& frame, int fd)
      DMUOND_REQUIRES(core_.mutex);
  // Waits until every rank is attached and the snapshot's weights are being published. False: they
  // are not at the deadline.
  absl::StatusOr<bool> WaitUntilRestarted(const v1::SessionKey& key, Core::Deadline deadline,
                                          const Core::Cancelled& cancelled)
      DMUOND_REQUIRES(core_.mutex);

  Core& core_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_ATTACH_CALLS_H_
