// Trainers' sessions: Hello, OpenSession, RegisterLayout, WatchSession, CloseSession.
//
// Threads: any; they block.
#ifndef DMUOND_SERVER_DAEMON_CALLS_SESSION_CALLS_H_
#define DMUOND_SERVER_DAEMON_CALLS_SESSION_CALLS_H_

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/v1/trainer.pb.h"
#include "server/daemon/core.h"

namespace dmuond::server {

class SessionCalls {
 public:
  explicit SessionCalls(Core& core) : core_(core) {}

  absl::StatusOr<v1::HelloReply> Hello(const v1::HelloRequest& request);
  // Whether what it says could be of some job.
  [[nodiscard]] absl::Status Check(const v1::OpenSessionRequest& request) const;
  // Whether OpenSession() has been called with this nonce, and its answer is still known.
  [[nodiscard]] bool HasHeardOf(const std::string& nonce);
  absl::StatusOr<v1::OpenSessionReply> OpenSession(const v1::OpenSessionRequest& request,
                                                   const Core::Cancelled& cancelled);
  // Checks, before more is read or kept for a call, that its key is that of an open session, and
  // that it comes from the process that made the session's attach connection: a child of a trainer
  // does not act for it. `caller` is null where it is not known. PERMISSION_DENIED, reason
  // SESSION_NOT_YOURS: another process calls.
  absl::Status CheckKey(const v1::SessionKey& key, const Caller* caller);
  absl::StatusOr<v1::RegisterLayoutReply> RegisterLayout(const v1::RegisterLayoutRequest& request,
                                                         const Core::Cancelled& cancelled);
  // `write` returns false when the caller has gone.
  absl::Status WatchSession(const v1::WatchSessionRequest& request,
                            const Core::Cancelled& cancelled,
                            const std::function<bool(const v1::SessionEvent&)>& write);
  absl::StatusOr<v1::CloseSessionReply> CloseSession(const v1::CloseSessionRequest& request);

 private:
  // Until no lane has mapped memory of trainers whose sessions have ended. DEADLINE_EXCEEDED.
  absl::Status WaitUntilUnmapped() DMUOND_REQUIRES(core_.mutex);
  absl::StatusOr<v1::OpenSessionReply> OpenClaimed(const v1::OpenSessionRequest& request,
                                                   const AttachPeer& peer,
                                                   const Core::Cancelled& cancelled)
      DMUOND_REQUIRES(core_.mutex);
  // Waits until the rank's last trainer is gone and its process has ended: it must not write beside
  // its successor. A process whose end is not seen is not waited for; its successor gets arenas of
  // its own (JobMemory::KeepFromOthers).
  absl::Status WaitUntilVacant(const v1::OpenSessionRequest& request,
                               const TrainerProcess& successor, const Core::Cancelled& cancelled)
      DMUOND_REQUIRES(core_.mutex);
  // Waits until the present job, of another launch, has ended. Gives up the lock.
  absl::Status DiscardOlder(const scheduler::NodeJob::Opening& opening,
                            const Core::Cancelled& cancelled) DMUOND_REQUIRES(core_.mutex);
  // The newest snapshot that the job can go on from; none for a session that discards. Says in the
  // opening whose job it is. Gives up the lock. PERMISSION_DENIED: snapshots of the name belong to
  // another user. FAILED_PRECONDITION: what would say whose they are cannot be read.
  absl::StatusOr<std::optional<scheduler::ResumePoint>> FindResume(
      scheduler::NodeJob::Opening& opening, const Core::Cancelled& cancelled)
      DMUOND_REQUIRES(core_.mutex);

  Core& core_;
};

// Why the session's last registration was refused, and how many were refused. REQUIRES: one was.
[[nodiscard]] absl::Status RefusalOf(const scheduler::RankTable::Session& session);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_SESSION_CALLS_H_
