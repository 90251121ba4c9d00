// What calls need to know of a trainer's session beside what NodeJob knows: who may speak for it,
// and the answers of calls that are repeated. A session is here as long as it is in NodeJob.
//
// Threads: the daemon's lock.
#ifndef DMUOND_SERVER_DAEMON_CALLS_CLIENTS_H_
#define DMUOND_SERVER_DAEMON_CALLS_CLIENTS_H_

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/v1/trainer.pb.h"
#include "scheduler/job/node_actions.h"
#include "scheduler/job/node_job.h"
#include "scheduler/step.h"
#include "server/daemon/calls/attach_server.h"
#include "server/daemon/calls/session_keys.h"

namespace dmuond::server {

// What one load_state_dict has brought so far: (fragment of the registration, kind) -> the tensor's
// bytes from its first on, as on the wire. Its call's own; what it holds counts for its session.
struct PushedState {
  PushedState() = default;
  ~PushedState() {
    if (held != nullptr) *held -= bytes;
  }
  PushedState(const PushedState&) = delete;
  PushedState& operator=(const PushedState&) = delete;

  std::map<std::pair<int32_t, v1::StateKind>, std::string> tensors;
  int64_t bytes = 0;                           // of all of them
  std::shared_ptr<std::atomic<int64_t>> held;  // Client::pushed_bytes; null: nothing has come yet
  int64_t held_max = 0;
};

// A LoadSnapshot: what has come of it, for one that is repeated.
struct LoadCall {
  bool running = false;  // one caller sees to it; others wait for its answer
  // The group has been told, in this epoch: the next rollback may be it.
  std::optional<scheduler::Rollback> told;
  std::optional<absl::StatusOr<int64_t>> answer;
};

// A session's caller.
struct Client {
  uint64_t id = 0;              // of the session
  uint64_t secret = 0;          // with `id` and the incarnation: the key of its calls
  uint64_t incarnation = 0;     // of the rank
  int32_t rank = 0;             //
  std::string request;          // OpenSession's, for one that is repeated
  v1::OpenSessionReply opened;  // its answer
  AttachId attach{};            // its connection
  std::string nonce;            // of that
  pid_t pid = 0;
  uid_t uid = 0;
  std::shared_ptr<const wire::UniqueFd> process;  // its pidfd, as AttachPeer's
  std::string device_uuid;                        // that it computes with; empty: the processor
  bool poison = false;                 // NaN into its weights between decision and publish
  std::vector<int32_t> job_parameter;  // parameter of the registration -> of the job's layout
  std::string attach_request;          // AttachBuffers', once begun; repeated ones wait for its end
  std::optional<v1::AttachBuffersReply> attach_reply;
  uint64_t load_attempt = 0;  // newest whose pushed state is being brought to its owners
  bool loading = false;
  // Of pushed state that is held now, in all of its calls; these may outlive it.
  std::shared_ptr<std::atomic<int64_t>> pushed_bytes = std::make_shared<std::atomic<int64_t>>(0);
  std::optional<v1::AckRollbackReply> acknowledge_reply;  // of the last rollback, once there is one
  std::map<uint64_t, LoadCall> loads;                     // by LoadSnapshotRequest.call; the newest

  [[nodiscard]] v1::SessionKey Key() const;
};

class Clients {
 public:
  // Set before anything else is called; outlives this object.
  void Bind(AttachServer* attach) { attach_ = attach; }

  // ---- open sessions ----
  Client& Add(Client client) { return clients_[client.id] = std::move(client); }
  // UNAVAILABLE (DRAINING: `leaves`; JOB_ENDED) or what its job's end has told: its session ended.
  // FAILED_PRECONDITION (INCARNATION_OLD): nobody has such a key.
  absl::StatusOr<Client*> Find(const v1::SessionKey& key, bool leaves);
  [[nodiscard]] Client* OfRequest(const std::string& request);
  [[nodiscard]] Client* OfAttach(AttachId id);
  [[nodiscard]] std::map<uint64_t, Client>& all() { return clients_; }

  // ---- sessions that are being opened ----
  // By nonce: each attach connection has its own, so that it tells a call that is repeated.
  std::set<std::string>& opening() { return opening_; }
  // Who is refused starts over with a new connection. This one stays until its other end is closed:
  // who has lost the refusal asks again, and must not take the daemon for gone.
  void KeepRefusal(AttachId attach, const std::string& nonce, const absl::Status& why);
  // Why the OpenSession of this nonce was refused; null: it was not.
  [[nodiscard]] const absl::Status* RefusalOf(const std::string& nonce) const;

  // ---- their end ----
  void OnEnded(const scheduler::node::SessionEnded& ended);
  // The answer of a CloseSession, for one that is repeated.
  void KeepClosed(const v1::SessionKey& key, const v1::CloseSessionReply& reply) {
    closed_.Keep(key, reply);
  }
  [[nodiscard]] const v1::CloseSessionReply* ClosedWith(const v1::SessionKey& key) const {
    return closed_.Find(key);
  }
  // The process of a session that has ended; null: it is not known, or has ended long ago.
  [[nodiscard]] std::shared_ptr<const wire::UniqueFd> ProcessOf(uint64_t session) const;
  // A connection has ended by itself. The session that it was of; nullopt: of none.
  std::optional<uint64_t> OnAttachGone(AttachId id);
  // Forgets refusals that nobody asks for any more.
  void OnTick(scheduler::TimePoint now);

  // By rank: why the coordinator lets a job stay that the rank wants to begin anew.
  std::map<int32_t, absl::Status>& discard_refusals() { return discard_refusals_; }

 private:
  struct RefusedOpen {
    std::string nonce;
    absl::Status status;
    scheduler::TimePoint forget_at;
  };

  AttachServer* attach_ = nullptr;
  std::map<uint64_t, Client> clients_;  // by session
  std::set<std::string> opening_;
  std::map<AttachId, RefusedOpen> refused_opens_;
  // Errors for sessions that ended with their job; OK: their trainers may begin anew.
  EndedSessions<absl::Status> ended_;
  EndedSessions<v1::CloseSessionReply> closed_;
  // By rank: the last session that ended, and its process, which may still run.
  std::map<int32_t, std::pair<uint64_t, std::shared_ptr<const wire::UniqueFd>>> processes_;
  std::map<int32_t, absl::Status> discard_refusals_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_CLIENTS_H_
