// What both ends of a connection between daemons prove to each other before anything of gRPC is
// read (peer.proto has the messages): that they belong to the group, by its secret, by the name in
// the certificate, or both. REQUIRES, of everybody here: TLS where there are names, and a secret
// where there are none.
//
// Threads: any, one for each stream.
#ifndef DMUOND_SERVER_DAEMON_GROUP_PEER_HANDSHAKE_H_
#define DMUOND_SERVER_DAEMON_GROUP_PEER_HANDSHAKE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/daemon/group/peer_secret.h"
#include "server/daemon/group/peer_stream.h"

namespace dmuond::server {

// What the daemons of a group prove themselves by. At least one is there.
struct PeerProofs {
  std::optional<PeerSecret> secret;
  std::vector<std::string> tls_names;  // by node: the name in its certificate
};

// Who listens, as node `node`, calls this; returns the node that connects. UNAUTHENTICATED
// (PEER_NOT_PROVEN): it is none of the group; it has been told why, as far as it speaks the same
// language. Other errors are the stream's.
[[nodiscard]] absl::StatusOr<int32_t> ProveCaller(const PeerProofs& proofs, int32_t node,
                                                  PeerStream& stream);

// Who connects, as node `node`, to the daemon of node `callee`. UNAUTHENTICATED (PEER_NOT_PROVEN):
// who listens is not, or does not believe this daemon. Other errors are the stream's.
[[nodiscard]] absl::Status ProveCallee(const PeerProofs& proofs, int32_t node, int32_t callee,
                                       PeerStream& stream);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_PEER_HANDSHAKE_H_
