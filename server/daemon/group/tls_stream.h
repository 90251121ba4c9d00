// TLS between daemons, which ends in the daemon itself: gRPC takes a connection that stands already
// by its descriptor alone, and without TLS. So this shakes hands, and then a thread carries bytes
// between the connection and a socket pair, whose other end gRPC gets.
//
//   auto tls = TlsStream::Accept(context, std::move(socket), patience);   // or Connect()
//   … Read, Write: both ends prove themselves …
//   TlsPumps pumps;
//   absl::StatusOr<UniqueFd> plain = pumps.Start(*std::move(tls));
//
// TLS 1.3 alone, with certificates of both ends, and no session is taken up again: whoever connects
// shows a certificate each time.
#ifndef DMUOND_SERVER_DAEMON_GROUP_TLS_STREAM_H_
#define DMUOND_SERVER_DAEMON_GROUP_TLS_STREAM_H_

#include <openssl/ssl.h>

#include <list>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "server/daemon/group/openssl_objects.h"
#include "server/daemon/group/peer_stream.h"
#include "server/daemon/group/peer_tls_files.h"

namespace dmuond::server {

class TlsStream final : public PeerStream {
 public:
  // Both shake hands. UNAVAILABLE says why that was in vain, DEADLINE_EXCEEDED and CANCELLED as
  // `patience` does.
  static absl::StatusOr<std::unique_ptr<TlsStream>> Accept(const TlsContext& context,
                                                           wire::UniqueFd socket,
                                                           const Patience& patience);
  // `host`: a name or an address that the certificate of who listens must be for; empty: the caller
  // looks at PeerNames().
  static absl::StatusOr<std::unique_ptr<TlsStream>> Connect(const TlsContext& context,
                                                            wire::UniqueFd socket,
                                                            const std::string& host,
                                                            const Patience& patience);

  absl::Status Read(char* data, size_t size) override;
  absl::Status Write(absl::string_view data) override;
  [[nodiscard]] std::string Binding() const override;
  // DNS names and addresses. A DNS name that is an address' text is none of them.
  [[nodiscard]] std::vector<std::string> PeerNames() const override;

 private:
  friend class TlsPump;
  TlsStream(const TlsContext& context, wire::UniqueFd socket, const Patience& patience);
  // Does `step` again whenever OpenSSL has waited for the socket, until it succeeds.
  template <typename Step>
  absl::Status Until(const Step& step);

  wire::UniqueFd socket_;
  const Patience patience_;
  const Ssl ssl_;
};

// The threads that carry bytes. Threads: any.
class TlsPumps {
 public:
  TlsPumps();
  ~TlsPumps();  // ends all of them, and their connections
  TlsPumps(const TlsPumps&) = delete;
  TlsPumps& operator=(const TlsPumps&) = delete;

  // Returns the end for gRPC, non-blocking. When either end closes, the other one sees that after
  // all that was sent before; what a connection had when it broke may be lost.
  [[nodiscard]] absl::StatusOr<wire::UniqueFd> Start(std::unique_ptr<TlsStream> stream);

 private:
  Mutex mutex_;
  std::list<std::unique_ptr<class TlsPump>> pumps_ DMUOND_GUARDED_BY(mutex_);
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_TLS_STREAM_H_
