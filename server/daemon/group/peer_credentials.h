// How daemons speak to each other (mutual TLS from PEM files, or plaintext where that is allowed),
// and how they prove who they are.
#ifndef DMUOND_SERVER_DAEMON_GROUP_PEER_CREDENTIALS_H_
#define DMUOND_SERVER_DAEMON_GROUP_PEER_CREDENTIALS_H_

#include <grpc/grpc_security.h>
#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/mutex.h"
#include "server/daemon/group/peer_secret.h"
#include "server/daemon/group/peer_tls_files.h"

namespace dmuond::server {

// The credentials of this daemon's server and of its channels, or plaintext. Threads: any.
class PeerCredentials {
 public:
  // All three files, or none. Without them: FAILED_PRECONDITION (PLAINTEXT_REFUSED) unless
  // `allow_plaintext` or both addresses are loopback ones. INVALID_ARGUMENT (TLS_FILE_INVALID) as
  // ReadTlsFiles() has it.
  static absl::StatusOr<std::unique_ptr<PeerCredentials>> Make(const TlsFiles& files,
                                                               bool allow_plaintext,
                                                               const std::string& listen,
                                                               const std::string& coordinator);

  // A server with these takes the newest certificate for each connection. The object must outlive
  // the server.
  [[nodiscard]] std::shared_ptr<grpc::ServerCredentials> server();
  // Of a channel that is made now.
  [[nodiscard]] std::shared_ptr<grpc::ChannelCredentials> channel() const;

  // Reads the files again: connections that are made from now on use what they hold, connections
  // that are there stay. An error changes nothing. REQUIRES: tls().
  absl::Status Reload();
  [[nodiscard]] bool tls() const { return files_.any(); }
  // When the first of the certificates expires; REQUIRES: tls().
  [[nodiscard]] absl::Time expires() const;

 private:
  explicit PeerCredentials(TlsFiles files) : files_(std::move(files)) {}

  static grpc_ssl_certificate_config_reload_status Fetch(
      void* self, grpc_ssl_server_certificate_config** config);
  // The caller's.
  [[nodiscard]] grpc_ssl_server_certificate_config* Newest() const;

  const TlsFiles files_;
  mutable Mutex mutex_;
  TlsPem pem_ DMUOND_GUARDED_BY(mutex_);
};

// A daemon proves by these in every call that it belongs to the group. At least one is there.
// REQUIRES: TLS where there are names.
struct PeerProofs {
  std::optional<PeerSecret> secret;
  std::vector<std::string> tls_names;  // by node: the name in its certificate
};

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
