// Whether daemons speak TLS to each other, and with which certificates.
//
// Threads: any.
#ifndef DMUOND_SERVER_DAEMON_GROUP_PEER_CREDENTIALS_H_
#define DMUOND_SERVER_DAEMON_GROUP_PEER_CREDENTIALS_H_

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "server/daemon/group/peer_tls_files.h"
#include "server/daemon/group/tls_stream.h"

namespace dmuond::server {

class PeerCredentials {
 public:
  // All three files, or none. Without them: FAILED_PRECONDITION (PLAINTEXT_REFUSED) unless
  // `allow_plaintext` or both addresses are loopback ones. INVALID_ARGUMENT (TLS_FILE_INVALID) as
  // ReadTlsFiles() has it.
  static absl::StatusOr<std::unique_ptr<PeerCredentials>> Make(const TlsFiles& files,
                                                               bool allow_plaintext,
                                                               const std::string& listen,
                                                               const std::string& coordinator);

  // Of a connection that begins now. Null: without TLS.
  [[nodiscard]] TlsContext context() const;

  // Reads the files again: connections that are made from now on use what they hold, connections
  // that are there stay. An error changes nothing. REQUIRES: tls().
  absl::Status Reload();
  [[nodiscard]] bool tls() const { return files_.any(); }
  // When the first of the certificates expires; REQUIRES: tls().
  [[nodiscard]] absl::Time expires() const;

 private:
  explicit PeerCredentials(TlsFiles files) : files_(std::move(files)) {}

  const TlsFiles files_;
  mutable Mutex mutex_;
  PeerTls tls_ DMUOND_GUARDED_BY(mutex_);
};

// "127.0.0.1:7070", "localhost:7070", "[::1]:7070".
[[nodiscard]] bool IsLoopback(const std::string& address);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_PEER_CREDENTIALS_H_
