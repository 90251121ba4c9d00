// How daemons speak to each other: mutual TLS from PEM files, or plaintext where that is allowed.
#ifndef DMUOND_SERVER_DAEMON_PEER_CREDENTIALS_H_
#define DMUOND_SERVER_DAEMON_PEER_CREDENTIALS_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"

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

// All three files, or none. Without them: FAILED_PRECONDITION (PLAINTEXT_REFUSED) unless
// `allow_plaintext` or both addresses are loopback ones. INVALID_ARGUMENT naming a file that cannot
// be read.
[[nodiscard]] absl::StatusOr<PeerCredentials> MakePeerCredentials(const TlsFiles& files,
                                                                  bool allow_plaintext,
                                                                  const std::string& listen,
                                                                  const std::string& coordinator);

// "127.0.0.1:7070", "localhost:7070", "[::1]:7070".
[[nodiscard]] bool IsLoopback(const std::string& address);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_PEER_CREDENTIALS_H_
