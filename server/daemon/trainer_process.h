// A trainer's process, as the attach connection shows it, and what follows for the memory that the
// process maps.
//
// Threads: any.
#ifndef DMUOND_SERVER_DAEMON_TRAINER_PROCESS_H_
#define DMUOND_SERVER_DAEMON_TRAINER_PROCESS_H_

#include <atomic>
#include <memory>
#include <utility>

#include "base/fault_point.h"
#include "dmuond/wire/peer_process.h"

namespace dmuond::server {

// What an older kernel does not tell, tests keep from the daemon here.
[[nodiscard]] inline wire::PeerProcess PeerOf(int connected) {
  return wire::PeerProcess::Of(connected,
                               {.peer_pidfd = fault::FaultPoint("daemon.peer_pidfd") == 0,
                                .inode = fault::FaultPoint("daemon.pidfd_inode") == 0});
}

struct TrainerProcess {
  explicit TrainerProcess(wire::PeerProcess peer) : peer(std::move(peer)) {}

  // A replacement has to wait for its end.
  [[nodiscard]] bool RunsBeside(const TrainerProcess& successor) const {
    return peer.EndIsSeen() && !peer.HasEnded() &&
           peer.id().SameAs(successor.peer.id()) == wire::ProcessId::Same::kNo;
  }
  // It may write into what it has mapped, and is not known to be `successor` itself.
  [[nodiscard]] bool MayWriteBeside(const TrainerProcess& successor) const {
    return !peer.HasEnded() && peer.id().SameAs(successor.peer.id()) != wire::ProcessId::Same::kYes;
  }
  // It is the process of `other`, by another connection, and its end is seen.
  [[nodiscard]] bool IsSeenFor(const TrainerProcess& other) const {
    return peer.EndIsSeen() && peer.id().SameAs(other.peer.id()) == wire::ProcessId::Same::kYes;
  }
  // Whether what it had mapped counts as free again: by its end, or by that of its connection where
  // its end is not seen.
  [[nodiscard]] bool HasLetGo() const {
    return peer.EndIsSeen() ? peer.HasEnded() : disconnected.load();
  }

  const wire::PeerProcess peer;
  std::atomic<bool> disconnected{false};  // its attach connection has ended, and not by Close()
};
using TrainerProcessPtr = std::shared_ptr<const TrainerProcess>;

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_TRAINER_PROCESS_H_
