// The PEM files by which daemons speak TLS to each other. They are looked at when the settings are
// checked, and whenever they are read: a file that cannot work is refused with its name and the
// reason, before anybody connects.
//
// Threads: any.
#ifndef DMUOND_SERVER_DAEMON_GROUP_PEER_TLS_FILES_H_
#define DMUOND_SERVER_DAEMON_GROUP_PEER_TLS_FILES_H_

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

// What the files hold.
struct TlsPem {
  std::string ca;
  std::string certificate;
  std::string key;
  absl::Time expires;  // when the first of the daemon's certificate and all authorities does
};

// INVALID_ARGUMENT (TLS_FILE_INVALID): a line for each mistake, with flag and path. A file is not
// given or cannot be read; it is not PEM, or broken; a certificate has expired at `now`, or is not
// valid yet; the key is open to everybody, has a passphrase, or is another certificate's.
[[nodiscard]] absl::StatusOr<TlsPem> ReadTlsFiles(const TlsFiles& files, absl::Time now);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_PEER_TLS_FILES_H_
