// How daemons speak to each other: mutual TLS from PEM files, or plaintext where that is allowed;
// and by what they know each other.
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

// How daemons prove in every call that they are of the group: at least one of both. REQUIRES: TLS
// where there are names.
struct PeerProofs {
  std::optional<PeerSecret> secret;
  std::vector<std::string> tls_names;  // by node: what its certificate has
};

// All three files, or none. Without them: FAILED_PRECONDITION (PLAINTEXT_REFUSED) unless
// `allow_plaintext` or both addresses are loopback ones. INVALID_ARGUMENT naming a file that cannot
// be read.
[[nodiscard]] absl::StatusOr<PeerCredentials> MakePeerCredentials(const TlsFiles& files,
                                                                  bool allow_plaintext,
                                                                  const std::string& listen,
                                                                  const std::string& coordinator);

// Whether the certificate of who calls has the name of the node that it says it is, as a DNS name
// or an address; wildcards do not count. UNAUTHENTICATED (PEER_NOT_PROVEN) names both. `names`: by
// node; empty: names are not looked at.
[[nodiscard]] absl::Status CheckNodeName(const grpc::AuthContext& caller,
                                         const std::vector<std::string>& names, int32_t node);

// To a node's Peer service; with names, the certificate of who answers there must have the node's.
[[nodiscard]] std::shared_ptr<grpc::Channel> ChannelTo(const std::string& address, int32_t node,
                                                       const PeerCredentials& credentials,
                                                       const PeerProofs& proofs);

// "127.0.0.1:7070", "localhost:7070", "[::1]:7070".
[[nodiscard]] bool IsLoopback(const std::string& address);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_PEER_CREDENTIALS_H_
