// The daemon: one core, and the calls that come from outside. The core has the lock and the
// machines (core.h); the files of calls/ have what each call does.
//
// Threads: any, but for Bind(), which comes first, and the destructor.
#ifndef DMUOND_SERVER_DAEMON_DAEMON_H_
#define DMUOND_SERVER_DAEMON_DAEMON_H_

#include <cstdint>

#include "server/daemon/calls/admin_calls.h"
#include "server/daemon/calls/attach_calls.h"
#include "server/daemon/calls/session_calls.h"
#include "server/daemon/calls/snapshot_calls.h"
#include "server/daemon/calls/step_calls.h"
#include "server/daemon/calls/tensor_calls.h"
#include "server/daemon/core.h"
#include "server/daemon/memory/node_device.h"

namespace dmuond::server {

class Daemon {
 public:
  using Cancelled = Core::Cancelled;
  // `device` outlives the daemon.
  Daemon(DaemonOptions options, NodeDevice& device) : core_(std::move(options), device) {}

  // Call it before anything else. `attach` and `peers` must live as long as the daemon is called.
  // `peers` is null in a group of one.
  void Bind(AttachServer* attach, PeerLinks* peers);

  // What trainers, operators and other daemons call.
  [[nodiscard]] SessionCalls& sessions() { return sessions_; }
  [[nodiscard]] AttachCalls& buffers() { return buffers_; }
  [[nodiscard]] StepCalls& steps() { return steps_; }
  [[nodiscard]] TensorCalls& tensors() { return tensors_; }
  [[nodiscard]] SnapshotCalls& snapshots() { return snapshots_; }
  [[nodiscard]] AdminCalls& admin() { return admin_; }
  // Where events enter, from their sources' threads.
  [[nodiscard]] Core& core() { return core_; }

  [[nodiscard]] bool formed();
  // The newest group epoch of which it was a part; 0: none.
  [[nodiscard]] uint32_t newest_epoch() const { return core_.newest_epoch.load(); }

 private:
  Core core_;
  SessionCalls sessions_{core_};
  AttachCalls buffers_{core_};
  TensorCalls tensors_{core_};
  StepCalls steps_{core_, tensors_};
  SnapshotCalls snapshots_{core_};
  AdminCalls admin_{core_};
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_DAEMON_H_
