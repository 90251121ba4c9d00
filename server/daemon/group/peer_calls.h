// Who may make the calls of the service Direct: a node of the group as it formed last, on a
// connection that it has made itself. Without TLS each call is proven as well, and counts once: the
// caller proves by the group's secret, over the call's name and contents, both nodes, the group's
// epoch and nonce and a counter; the callee proves in its answer that it knows the secret too. With
// TLS nobody on the way can do anything to a call, so only node and epoch are said and looked at.
//
//   const std::string awaited = calls.Prove("ReadState", owner, request);    // caller
//   absl::Status status = calls.Check("ReadState", request, connected);      // callee
//   metadata[kReplyProof] = calls.ReplyProof(request.proof());               // callee
//
// Threads: any.
#ifndef DMUOND_SERVER_DAEMON_GROUP_PEER_CALLS_H_
#define DMUOND_SERVER_DAEMON_GROUP_PEER_CALLS_H_

#include <bitset>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "base/mutex.h"
#include "dmuond/v1/peer.pb.h"
#include "server/daemon/group/peer_secret.h"

namespace dmuond::server {

// In the answer's initial metadata.
inline constexpr char kReplyProof[] = "dmuond-proof-bin";

// Which counters of one caller have been used. Calls overtake each other: of the newest kWindow
// counters each is taken once, older ones are not.
class UsedCounters {
 public:
  static constexpr uint64_t kWindow = 4096;
  // False: it was used, or may have been.
  bool Use(uint64_t counter);

 private:
  uint64_t newest_ = 0;
  std::bitset<kWindow> used_;  // by counter modulo kWindow: the last kWindow ones
};

class PeerCalls {
 public:
  // `secret`: unset where the connections' own proofs are enough.
  PeerCalls(int32_t node, int32_t nodes, std::optional<PeerSecret> secret)
      : node_(node), nodes_(nodes), secret_(std::move(secret)) {}

  // The group has formed anew: proofs from before count no more.
  void OnFormed(uint32_t epoch, std::string nonce);

  // Sets `request.proof`; returns what the callee's answer must prove. Empty: nothing.
  template <typename Request>
  std::string Prove(const char* method, int32_t callee, Request& request) {
    request.clear_proof();
    std::string awaited;
    *request.mutable_proof() =
        MakeProof(method, callee, secret_.has_value() ? request.SerializeAsString() : "", awaited);
    return awaited;
  }
  // `connected`: the node that has made the connection by which the call came.
  // UNAUTHENTICATED (PEER_NOT_PROVEN): no node of the group has made this call to this one now.
  // UNAVAILABLE (PEER_EPOCH_DIFFERS): one of both does not know yet that the group has formed anew.
  template <typename Request>
  absl::Status Check(const char* method, const Request& request, int32_t connected) {
    if (!request.has_proof()) return NotProven(method, request.proof(), "it carries no proof");
    if (request.proof().node() != connected) {
      return NotProven(method, request.proof(), "another node has made the connection");
    }
    std::string plain;
    if (secret_.has_value()) {
      Request without = request;
      without.clear_proof();
      plain = without.SerializeAsString();
    }
    return CheckProof(method, request.proof(), plain);
  }
  // Empty where calls are not proven.
  [[nodiscard]] std::string ReplyProof(const v1::PeerProof& proof) const;

 private:
  v1::PeerProof MakeProof(const char* method, int32_t callee, const std::string& request,
                          std::string& awaited);
  absl::Status CheckProof(const char* method, const v1::PeerProof& proof,
                          const std::string& request);
  [[nodiscard]] absl::Status NotProven(const char* method, const v1::PeerProof& proof,
                                       const char* why) const;

  const int32_t node_;
  const int32_t nodes_;
  const std::optional<PeerSecret> secret_;
  Mutex mutex_;
  uint32_t epoch_ DMUOND_GUARDED_BY(mutex_) = 0;  // 0: the group has not formed yet
  std::string nonce_ DMUOND_GUARDED_BY(mutex_);
  uint64_t counter_ DMUOND_GUARDED_BY(mutex_) = 0;                  // of the last call of this node
  std::map<int32_t, UsedCounters> used_ DMUOND_GUARDED_BY(mutex_);  // by caller
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_PEER_CALLS_H_
