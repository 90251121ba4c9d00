#include "server/daemon/group/peer_credentials.h"

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "server/common/errors.h"

namespace dmuond::server {

bool IsLoopback(const std::string& address) {
  return address.empty() || absl::StartsWith(address, "127.") ||
         absl::StartsWith(address, "localhost:") || absl::StartsWith(address, "[::1]:");
}

absl::StatusOr<std::unique_ptr<PeerCredentials>> PeerCredentials::Make(
    const TlsFiles& files, bool allow_plaintext, const std::string& listen,
    const std::string& coordinator) {
  auto made = std::unique_ptr<PeerCredentials>(new PeerCredentials(files));
  if (made->tls()) {
    if (absl::Status read = made->Reload(); !read.ok()) return read;
  } else if (!allow_plaintext && (!IsLoopback(listen) || !IsLoopback(coordinator))) {
    return Error(
        absl::StatusCode::kFailedPrecondition, "PLAINTEXT_REFUSED",
        Say("daemons would speak plaintext beyond loopback (listening on '",
            Named("peer_listen", listen), "', coordinator '", Named("coordinator", coordinator),
            "'): give the TLS files, or --allow_plaintext_peers"));
  }
  return made;
}

absl::Status PeerCredentials::Reload() {
  absl::StatusOr<PeerTls> read = ReadTlsFiles(files_, absl::Now());
  if (!read.ok()) return read.status();
  MutexLock lock(mutex_);
  tls_ = *std::move(read);
  return absl::OkStatus();
}

TlsContext PeerCredentials::context() const {
  MutexLock lock(mutex_);
  return tls_.context;
}

absl::Time PeerCredentials::expires() const {
  MutexLock lock(mutex_);
  return tls_.expires;
}

}  // namespace dmuond::server
