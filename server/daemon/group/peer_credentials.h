// How daemons speak to each other (mutual TLS from PEM files, or plaintext where that is allowed),
// and how they prove who they are.
#ifndef DMUOND_SERVER_DAEMON_GROUP_PEER_CREDENTIALS_H_
#define DMUOND_SERVER_DAEMON_GROUP_PEER_CREDENTIALS_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/daemon/group/peer_secret.h"

namespace dmuond::server {

struct TlsFiles {
  std::string ca;
  std::string certificate;
  std::string key;
};
struct PeerCredentials {
  std::shared_ptr<grpc::ServerCredentials> server;
  std::shared_ptr<grpc::ChannelCredentials> channel;
};

// A daemon proves by these in every call that it belongs to the group. At least one is there.
// REQUIRES: TLS where there are names.
struct PeerProofs {
  std::optional<PeerSecret> secret;
  std::vector<std::string> tls_names;  // by node: the name in its certificate
};

// All three files, or none. Without them: FAILED_PRECONDITION (PLAINTEXT_REFUSED) unless
// `allow_plaintext` or both addresses are loopback ones. INVALID_ARGUMENT naming a file that cannot
// be read.
[[nodiscard]] absl::StatusOr<PeerCredentials> MakePeerCredentials(const TlsFiles& files,
                                                                  bool allow_plaintext,
                                                                  const std::string& listen,
                                                                  const std::string& coordinator);

// Checks that the caller's certificate has the name of node `node`, as a DNS name or an address;
// wildcards do not count. UNAUTHENTICATED (PEER_NOT_PROVEN) names both. `names` are by node; empty:
// names are not checked.
[[nodiscard]] absl::Status CheckNodeName(const grpc::AuthContext& caller,
                                         const std::vector<std::string>& names, int32_t node);

// A channel to a node's Peer service. With names, the server's certificate must have the node's
// name.
[[nodiscard]] std::shared_ptr<grpc::Channel> ChannelTo(const std::string& address, int32_t node,
                                                       const PeerCredentials& credentials,
                                                       const PeerProofs& proofs);

// "127.0.0.1:7070", "localhost:7070", "[::1]:7070".
[[nodiscard]] bool IsLoopback(const std::string& address);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_PEER_CREDENTIALS_H_
