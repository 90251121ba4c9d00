// The PEM files by which daemons speak TLS to each other. They are looked at when the settings are
// checked, and whenever they are read: a file that cannot work is refused with its name and the
// reason, before anybody connects.
//
// Threads: any.
#ifndef DMUOND_SERVER_DAEMON_GROUP_PEER_TLS_FILES_H_
#define DMUOND_SERVER_DAEMON_GROUP_PEER_TLS_FILES_H_

#include <openssl/ssl.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace dmuond::server {

struct TlsFiles {
  std::string ca;
  std::string certificate;
  std::string key;

  [[nodiscard]] bool any() const { return !ca.empty() || !certificate.empty() || !key.empty(); }
};

// Certificates and key, for connections of either direction. Connections keep what they began with.
using TlsContext = std::shared_ptr<SSL_CTX>;

// What the files hold.
struct PeerTls {
  TlsContext context;
  absl::Time expires;  // when the first of the daemon's certificate and all authorities does
};

// INVALID_ARGUMENT (TLS_FILE_INVALID): a line for each mistake, with flag and path. A file is not
// given or cannot be read; it is not PEM, or broken; a certificate has expired at `now`, or is not
// valid yet; a key or a signature is weaker than OpenSSL lets connections be here; the key is open
// to everybody, has a passphrase, or is another certificate's; TLS 1.3 cannot use it, as a
// handshake of the daemon with itself shows.
[[nodiscard]] absl::StatusOr<PeerTls> ReadTlsFiles(const TlsFiles& files, absl::Time now);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_PEER_TLS_FILES_H_
