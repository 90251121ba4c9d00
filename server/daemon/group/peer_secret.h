// The secret that the daemons of a group share (--peer_secret_file), and proofs with it. A proof is
// OpenSSL's HMAC-SHA-256 over a label that no other proof has and all that the proof is about, each
// part with its length before it. docs/security.md says against whom this protects.
//
// When a connection begins, who listens proves first that it knows the secret, then who connects
// (peer_handshake.h). Both proofs cover the PeerHello, with both nodes and the caller's nonce in
// it, the node that listens and its nonce, and what binds them to the connection, so that neither
// can be used again, elsewhere, or by the other end.
//
// Threads: any; a secret does not change.
#ifndef DMUOND_SERVER_DAEMON_GROUP_PEER_SECRET_H_
#define DMUOND_SERVER_DAEMON_GROUP_PEER_SECRET_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "dmuond/v1/peer.pb.h"

namespace dmuond::server {

// Random bytes of OpenSSL's generator, as many as a nonce has.
[[nodiscard]] std::string NewNonce();
inline constexpr size_t kNonceBytes = 32;

class PeerSecret {
 public:
  // REQUIRES: `key` is not empty. Config::ReadPeerSecret() reads it.
  explicit PeerSecret(std::string key) : key_(std::move(key)) {}

  // ---- when a connection begins; `binding`: PeerStream::Binding() ----
  // By who listens, as node `node`. It says so of itself: what a hello asks for would make every
  // daemon a proof of any node. REQUIRES: the hello's nonce has kNonceBytes.
  [[nodiscard]] v1::PeerChallenge Challenge(const v1::PeerHello& hello, int32_t node,
                                            const std::string& binding) const;
  // By who connects: whether the sender of the challenge knows the secret.
  [[nodiscard]] bool CheckChallenge(const v1::PeerHello& hello, const std::string& binding,
                                    const v1::PeerChallenge& challenge) const;
  [[nodiscard]] v1::PeerAnswer Answer(const v1::PeerHello& hello, const std::string& binding,
                                      const v1::PeerChallenge& challenge) const;
  // By who listens: whether who connects knows the secret.
  [[nodiscard]] bool CheckAnswer(const v1::PeerHello& hello, const std::string& binding,
                                 const v1::PeerChallenge& challenge,
                                 const v1::PeerAnswer& answer) const;

  // ---- in calls; peer_calls.h puts the parts together ----
  // The proof of `parts` for the purpose that `label` names: 32 bytes.
  [[nodiscard]] std::string Prove(absl::string_view label,
                                  const std::vector<std::string>& parts) const;
  // Whether `proof` is that of `parts`. Constant time.
  [[nodiscard]] bool Proves(const std::string& proof, absl::string_view label,
                            const std::vector<std::string>& parts) const;

 private:
  std::string key_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_PEER_SECRET_H_
