// What calls need to know of a trainer's session beside what NodeJob knows: who may speak for it,
// and the answers of calls that are repeated. A session is here as long as it is in NodeJob.
//
// Threads: the daemon's lock.
#ifndef DMUOND_SERVER_DAEMON_CALLS_CLIENTS_H_
#define DMUOND_SERVER_DAEMON_CALLS_CLIENTS_H_

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

// The state that one load_state_dict has pushed so far: (fragment of the registration, kind) -> the
// tensor's bytes from its first on, as on the wire. Its call owns it; its bytes count for the
// session.
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

// A LoadSnapshot and its result, for a client that repeats the call.
struct LoadCall {
  bool running = false;  // one caller performs it; others wait for its answer
  // The group was asked to go back, in this epoch: the next rollback may be the one.
  std::optional<scheduler::Rollback> told;
  std::optional<absl::StatusOr<int64_t>> answer;
};

// A session's caller.
struct Client {
  uint64_t id = 0;           // of the session
  uint64_t secret = 0;       // with `id` and the incarnation: the key of its calls
  uint64_t incarnation = 0;  // of the rank
  int32_t rank = 0;
  std::string request;          // OpenSession's, to know a repeated one
  v1::OpenSessionReply opened;  // the answer to it
  AttachId attach{};            // the trainer's connection
  std::string nonce;            // of the connection
  TrainerProcessPtr process;
  std::string device_uuid;             // that it computes with; empty: the processor
  bool poison = false;                 // NaN into its weights between decision and publish
  std::vector<int32_t> job_parameter;  // parameter of the registration -> of the job's layout
  std::string attach_request;  // AttachBuffers', once begun: a repeated one waits for its end
  std::optional<v1::AttachBuffersReply> attach_reply;
  uint64_t load_attempt = 0;  // newest whose pushed state is being sent to its owners
  bool loading = false;
  // So much pushed state its calls hold now. A call may outlive the session, so it is shared.
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
  // If the session has ended: UNAVAILABLE (DRAINING if `leaves`, else JOB_ENDED), or the error that
  // its job ended with, or that the group refused it for. FAILED_PRECONDITION (INCARNATION_OLD): no
  // session has this key.
  absl::StatusOr<Client*> Find(const v1::SessionKey& key, bool leaves);
  [[nodiscard]] Client* OfRequest(const std::string& request);
  [[nodiscard]] Client* OfAttach(AttachId id);
  [[nodiscard]] std::map<uint64_t, Client>& all() { return clients_; }

  // Whether an OpenSession with this nonce is under way, was refused, or has opened a session.
  [[nodiscard]] bool Knows(const std::string& nonce) const;

  // ---- sessions that are being opened ----
  // Their nonces. Each attach connection has its own, so that a repeated call is known by it.
  std::set<std::string>& opening() { return opening_; }
  // Keeps why the OpenSession of this nonce was refused. The connection stays until the client
  // closes it: a client that has not got the refusal asks again, and would take a closed connection
  // for the daemon's end.
  void KeepRefusal(AttachId attach, const std::string& nonce, const absl::Status& why);
  // Why the OpenSession of this nonce was refused; null: it was not.
  [[nodiscard]] const absl::Status* RefusalOf(const std::string& nonce) const;

  // ---- their end ----
  void OnEnded(const scheduler::node::SessionEnded& ended);
  // Keeps the answer to a CloseSession, for a client that repeats the call.
  void KeepClosed(const v1::SessionKey& key, const v1::CloseSessionReply& reply) {
    closed_.Keep(key, reply);
  }
  [[nodiscard]] const v1::CloseSessionReply* ClosedWith(const v1::SessionKey& key) const {
    return closed_.Find(key);
  }
  // The process of a session that has ended; null: it is not known.
  [[nodiscard]] TrainerProcessPtr ProcessOf(uint64_t session) const;
  // A connection has ended by itself. Returns its session; nullopt: it had none.
  std::optional<uint64_t> OnAttachGone(AttachId id);
  // Forgets refusals that nobody asks for any more.
  void OnTick(scheduler::TimePoint now);

  // By rank: why the coordinator has refused to end the job that the rank wants to begin anew.
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
  // By rank: the last session that ended without a refusal, and its process, which may still run.
  std::map<int32_t, std::pair<uint64_t, TrainerProcessPtr>> processes_;
  std::map<int32_t, absl::Status> discard_refusals_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_CLIENTS_H_
