// A connection between daemons before gRPC gets it: what both ends say to prove themselves goes
// through this, with TLS or without.
//
// Threads: one at a time.
#ifndef DMUOND_SERVER_DAEMON_GROUP_PEER_STREAM_H_
#define DMUOND_SERVER_DAEMON_GROUP_PEER_STREAM_H_

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/unique_fd.h"
#include "server/daemon/group/tcp.h"

namespace dmuond::server {

class PeerStream {
 public:
  virtual ~PeerStream() = default;
  // All `size` bytes. Errors: UNAVAILABLE, the connection has ended; DEADLINE_EXCEEDED, CANCELLED.
  virtual absl::Status Read(char* data, size_t size) = 0;
  virtual absl::Status Write(absl::string_view data) = 0;
  // What no other connection has: proofs with it are of no use on one. Empty without TLS.
  [[nodiscard]] virtual std::string Binding() const = 0;
  // The names in the other end's certificate. None without TLS.
  [[nodiscard]] virtual std::vector<std::string> PeerNames() const = 0;
};

class PlainStream final : public PeerStream {
 public:
  // `socket` is non-blocking.
  PlainStream(wire::UniqueFd socket, const Patience& patience)
      : socket_(std::move(socket)), patience_(patience) {}
  absl::Status Read(char* data, size_t size) override;
  absl::Status Write(absl::string_view data) override;
  [[nodiscard]] std::string Binding() const override { return ""; }
  [[nodiscard]] std::vector<std::string> PeerNames() const override { return {}; }
  // Nothing beyond what was read has been taken from it.
  wire::UniqueFd Release() { return std::move(socket_); }

 private:
  wire::UniqueFd socket_;
  const Patience patience_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_PEER_STREAM_H_
