// Makes connections between daemons, and proves both ends of each before anybody reads gRPC from
// it: with TLS where there are certificates (tls_stream.h), then by what peer_handshake.h asks for.
//
//   absl::StatusOr<UniqueFd> fd = connections.Connect(address, /*callee=*/0);
//   … grpc::CreateInsecureChannelFromFd("node 0", fd->Release()) …
//
// A channel that is made of a descriptor has that one connection and makes no other: whoever needs
// the node after its end connects again.
//
// Threads: any.
#ifndef DMUOND_SERVER_DAEMON_GROUP_PEER_CONNECTIONS_H_
#define DMUOND_SERVER_DAEMON_GROUP_PEER_CONNECTIONS_H_

#include <chrono>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "server/daemon/group/peer_credentials.h"
#include "server/daemon/group/peer_handshake.h"
#include "server/daemon/group/tls_stream.h"

namespace dmuond::server {

// What a connection may take from its beginning until both ends are proven.
inline constexpr std::chrono::milliseconds kUnprovenMax{5000};

class PeerConnections {
 public:
  // Of node `node`. The first two must outlive it.
  PeerConnections(int32_t node, const PeerProofs& proofs, const PeerCredentials& credentials);

  struct Proven {
    wire::UniqueFd socket;  // for gRPC, non-blocking
    int32_t node = -1;      // that has connected
  };
  // Of a connection that was accepted. Errors say why it is of no use: UNAUTHENTICATED
  // (PEER_NOT_PROVEN), or the network's.
  [[nodiscard]] absl::StatusOr<Proven> Prove(wire::UniqueFd socket);
  // To the daemon of node `callee`; the same errors, which name the address.
  [[nodiscard]] absl::StatusOr<wire::UniqueFd> Connect(const std::string& address, int32_t callee);
  // Connect() fails from now on (CANCELLED), and whoever waits in it returns.
  void Stop();

 private:
  [[nodiscard]] Patience PatienceFromNow() const;
  absl::StatusOr<wire::UniqueFd> TryConnect(const std::string& address, int32_t callee);

  const int32_t node_;
  const PeerProofs& proofs_;
  const PeerCredentials& credentials_;
  const wire::UniqueFd stop_;  // an eventfd
  TlsPumps pumps_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_PEER_CONNECTIONS_H_
