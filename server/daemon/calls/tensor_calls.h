// state_dict and load_state_dict: state tensors read from and written to the units that own them,
// on this node and others. The lock is given up while lanes and peers answer: what was found before
// is found again after.
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
  // Brings what a rank has pushed to the units' owners; they keep it until the load commits. Once
  // for each attempt: a repeated push waits for the first. REQUIRES: the core's lock, which the
  // compiler's check does not see to be the caller's.
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
  // Where the chunk's bytes belong, which are counted already.
  absl::StatusOr<std::string*> PlaceOfChunk(const v1::SessionKey& key, const v1::StateChunk& chunk,
                                            PushedState& state) DMUOND_REQUIRES(core_.mutex);
  // For a chunk of a session that may hold `bytes_max`, and of a job that has a limit of its own.
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
