// The way into a group's daemon as one of its nodes, for tests that are none.
#ifndef DMUOND_TESTS_SERVER_SYSTEM_PEER_CLIENT_H_
#define DMUOND_TESTS_SERVER_SYSTEM_PEER_CLIENT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "grpcpp/grpcpp.h"
#include "server/daemon/group/peer_channel.h"
#include "server/daemon/group/peer_connections.h"
#include "tests/client/daemon_group.h"

namespace dmuond::testing {

class PeerClient {
 public:
  // As node `node`, by the tests' secret unless told otherwise, with TLS where there are files.
  explicit PeerClient(int32_t node,
                      server::PeerProofs proofs = {server::PeerSecret(kGroupSecret), {}},
                      const server::TlsFiles& files = {})
      : proofs_(std::move(proofs)),
        credentials_(*server::PeerCredentials::Make(files, /*allow_plaintext=*/true, "", "")),
        connections_(node, proofs_, *credentials_) {}

  // It has this one connection.
  absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(const std::string& address,
                                                         int32_t callee = 0) {
    absl::StatusOr<wire::UniqueFd> connected = connections_.Connect(address, callee);
    if (!connected.ok()) return connected.status();
    return server::ChannelOver(*std::move(connected));
  }
  server::PeerConnections& connections() { return connections_; }

 private:
  const server::PeerProofs proofs_;
  const std::unique_ptr<server::PeerCredentials> credentials_;
  server::PeerConnections connections_;
};

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_SERVER_SYSTEM_PEER_CLIENT_H_
