// state_dict and load_state_dict: reads state tensors from the lanes that own them, and writes them
// there, on this node and others. The lock is given up while lanes and peers answer, so that what
// was looked up before is looked up again afterwards.
//
// Threads: any; they block.
#ifndef DMUOND_SERVER_DAEMON_CALLS_TENSOR_CALLS_H_
#define DMUOND_SERVER_DAEMON_CALLS_TENSOR_CALLS_H_

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/v1/peer.pb.h"
#include "dmuond/v1/trainer.pb.h"
#include "scheduler/reason.h"
#include "server/daemon/core.h"
#include "server/daemon/memory/state_transfer.h"

namespace dmuond::server {

class TensorCalls {
 public:
  explicit TensorCalls(Core& core) : core_(core) {}

  // ---- trainers ----
  // `write` returns false when the caller has gone.
  absl::Status PullParameters(const v1::PullParametersRequest& request,
                              const Core::Cancelled& cancelled,
                              const std::function<bool(const v1::PullParametersReply&)>& write);
  absl::Status CheckMayPush(const v1::SessionKey& key);
  absl::Status KeepStateChunk(const v1::SessionKey& key, const v1::StateChunk& chunk,
                              PushedState& state);
  // Sends what a rank has pushed to the units' owners, which keep it until the load commits. This
  // happens once for each attempt: a repeated push waits for the first one. REQUIRES: the core's
  // lock. (The compiler's check does not see that it is the caller's.)
  absl::Status LoadPushedState(const v1::SessionKey& key, const PushedState& state,
                               const Core::Cancelled& cancelled)
      DMUOND_THREAD_ANNOTATION(no_thread_safety_analysis);

  // ---- another node's trainers: state that is owned here ----
  absl::StatusOr<StateTensor> ReadStateForPeer(const v1::ReadStateRequest& request,
                                               const Core::Cancelled& cancelled);
  absl::Status WriteStateForPeer(const v1::WriteStateRequest& part);

 private:
  absl::StatusOr<StateTensor> ReadUnit(scheduler::UnitId id, v1::StateKind kind,
                                       const Core::Cancelled& cancelled)
      DMUOND_REQUIRES(core_.mutex);
  absl::StatusOr<double> ReadUpdates(scheduler::UnitId id) DMUOND_REQUIRES(core_.mutex);
  // The place for the chunk's bytes, which count for the session already.
  absl::StatusOr<std::string*> PlaceOfChunk(const v1::SessionKey& key, const v1::StateChunk& chunk,
                                            PushedState& state) DMUOND_REQUIRES(core_.mutex);
  // Whether a chunk fits into what the session (`bytes_max`) and the job may hold.
  [[nodiscard]] absl::Status CheckRoom(const Client& client, const scheduler::Message& tensor,
                                       int64_t bytes, int64_t bytes_max)
      DMUOND_REQUIRES(core_.mutex);
  absl::Status SpreadPushedState(const v1::SessionKey& key, const PushedState& state,
                                 uint64_t attempt) DMUOND_EXCLUDES(core_.mutex);
  absl::Status BringToOwner(const scheduler::Unit& unit, const v1::WriteStateRequest& part)
      DMUOND_EXCLUDES(core_.mutex);

  Core& core_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_TENSOR_CALLS_H_
