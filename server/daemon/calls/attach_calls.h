// AttachBuffers: a trainer's arenas and timeline, made or kept, handed out and mapped by the lanes;
// and AckRollback, by which a trainer says that they may be written again.
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
  // Descriptors of a trainer's memory, which stay the job's memory's.
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
  // Until lanes can map the session's memory, and nothing is published to what they have mapped.
  absl::Status WaitUntilMappable(const v1::SessionKey& key) DMUOND_REQUIRES(core_.mutex);
  // Made without the lock: the session, and the job, may have ended when it returns. REQUIRES: the
  // session is there, and the job's memory.
  absl::StatusOr<TrainerMemory> Allocate(const v1::AttachBuffersRequest& request, uint32_t buckets)
      DMUOND_REQUIRES(core_.mutex);
  // To the trainer, by its attach connection, and into the command for the lanes.
  absl::Status HandOut(const v1::AttachBuffersRequest& request, const TrainerMemory& memory,
                       v1::LaneCommand::AttachTrainer& attach) DMUOND_REQUIRES(core_.mutex);
  // On its attach connection. One that has ended takes its session along: as soon as that has been
  // noticed, what anybody gets who calls for such a session.
  absl::Status SendToTrainer(const v1::SessionKey& key, const v1::AttachFrame& frame, int fd)
      DMUOND_REQUIRES(core_.mutex);
  // Until every rank is attached and the snapshot's weights are on their way; false: not in time.
  absl::StatusOr<bool> WaitUntilRestarted(const v1::SessionKey& key, Core::Deadline deadline,
                                          const Core::Cancelled& cancelled)
      DMUOND_REQUIRES(core_.mutex);

  Core& core_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_ATTACH_CALLS_H_
