// The attach socket. By it the daemon learns who a trainer is and that it lives, and sends it
// descriptors.
//
// A trainer connects <socket>.attach (SOCK_SEQPACKET) and gets a Welcome with a nonce; OpenSession
// carries the nonce, by which the daemon claims the connection. From then on the end of the
// connection, or of the process that made it, is the end of the trainer. Trainers say nothing here:
// one that sends anything is closed, as is one that is not claimed in time.
//
//   auto server = AttachServer::Start({.path = socket + ".attach"}, {.on_gone = …});
//   absl::StatusOr<AttachPeer> peer = (*server)->Claim(request.nonce());
//   RETURN_IF_ERROR((*server)->Send(peer->id, frame, arena_fd));
//
// Threads: all methods from any. One thread of its own accepts, watches and calls back.
#ifndef DMUOND_SERVER_DAEMON_CALLS_ATTACH_SERVER_H_
#define DMUOND_SERVER_DAEMON_CALLS_ATTACH_SERVER_H_

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/mutex.h"
#include "base/unique_fd.h"
#include "dmuond/v1/attach.pb.h"
#include "scheduler/types.h"
#include "server/common/seldom.h"
#include "server/daemon/calls/connection_limits.h"
#include "server/daemon/calls/unix_listener.h"
#include "server/daemon/trainer_process.h"

namespace dmuond::server {

using AttachId = scheduler::Strong<struct AttachIdTag, uint64_t>;  // from 1; never used again

struct AttachPeer {
  AttachId id;
  TrainerProcessPtr process;
};

class AttachServer {
 public:
  struct Options {
    std::string path;                 // of the socket; nothing may lie there
    mode_t mode = 0600;               // 0600 or 0660
    std::optional<gid_t> group;       // of the socket file; unset: the process's
    std::vector<uid_t> allowed_uids;  // empty: the daemon's own
    std::chrono::milliseconds claim_timeout{60'000};
    ConnectionLimits::Limits limits;  // a connection that is not claimed is a stranger's
  };
  struct Callbacks {
    // A claimed connection has ended, and not by Close(). Called once for each, by the server's
    // thread, which holds no lock.
    std::function<void(AttachId)> on_gone;
  };

  // Listens. UNAVAILABLE or ALREADY_EXISTS naming the path when it cannot.
  static absl::StatusOr<std::unique_ptr<AttachServer>> Start(Options options, Callbacks callbacks);

  // Closes all connections without calling back, and removes the socket.
  // REQUIRES: not from a callback.
  ~AttachServer();
  AttachServer(const AttachServer&) = delete;
  AttachServer& operator=(const AttachServer&) = delete;

  // Each nonce is good for one call. UNAUTHENTICATED, reason NONCE_UNKNOWN: never handed out, used,
  // or its connection is gone; reason CLAIM_EXPIRED: its connection was closed because this call
  // came later than claim_timeout (of the last 1024 such connections). The caller now ends the
  // connection with Close(), unless it ends by itself.
  absl::StatusOr<AttachPeer> Claim(absl::string_view nonce);

  // Whether a nonce could be claimed now.
  [[nodiscard]] bool Knows(absl::string_view nonce);

  // Never blocks. `fd` (-1: none) stays the caller's. NOT_FOUND, reason TRAINER_LOST: the
  // connection has ended. A peer that does not read its frames is closed, and counts as gone.
  absl::Status Send(AttachId id, const v1::AttachFrame& frame, int fd = -1);

  // Ends the connection, if it has not ended yet. on_gone is not called for it after this returns,
  // except for a call that runs already. Where the end of the process is not seen, this end listens
  // on until the process has closed its own.
  void Close(AttachId id);

 private:
  struct Connection;
  AttachServer(Options options, Callbacks callbacks, ListeningSocket listener, wire::UniqueFd wake);

  void Run();
  struct Round;  // what the thread polls at a time
  void FillRound(Round& round) DMUOND_EXCLUDES(mutex_);
  void AcceptAll() DMUOND_EXCLUDES(mutex_);
  void Welcome(wire::UniqueFd socket) DMUOND_EXCLUDES(mutex_);
  void DropOverdue() DMUOND_EXCLUDES(mutex_);
  void ForgiveTheStopped() DMUOND_EXCLUDES(mutex_);
  void EndByItself(AttachId id) DMUOND_EXCLUDES(mutex_);
  std::shared_ptr<Connection> Remove(AttachId id) DMUOND_REQUIRES(mutex_);
  void Wake();

  const Options options_;
  const Callbacks callbacks_;
  ListeningSocket listener_;
  const wire::UniqueFd wake_;
  std::chrono::steady_clock::time_point accept_again_{};  // the thread's own
  Seldom refusals_;                                       // the thread's own
  Seldom pauses_;                                         // of accepting; the thread's own

  Mutex mutex_;
  bool stop_ DMUOND_GUARDED_BY(mutex_) = false;
  uint64_t next_id_ DMUOND_GUARDED_BY(mutex_) = 1;
  ConnectionLimits limits_ DMUOND_GUARDED_BY(mutex_);
  std::map<AttachId, std::shared_ptr<Connection>> connections_ DMUOND_GUARDED_BY(mutex_);
  std::map<std::string, AttachId> nonces_ DMUOND_GUARDED_BY(mutex_);
  std::deque<std::string> expired_ DMUOND_GUARDED_BY(mutex_);  // nonces, the newest last

  std::thread thread_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_ATTACH_SERVER_H_
