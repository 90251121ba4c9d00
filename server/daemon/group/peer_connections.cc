#include "server/daemon/group/peer_connections.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/common/errors.h"
#include "server/daemon/calls/tcp_listener.h"
#include "server/daemon/group/tcp.h"

namespace dmuond::server {
namespace {

// OpenSSL's own words about bytes that are not TLS are of no use to anybody.
absl::Status BeginsTls(int socket, const Patience& patience) {
  if (absl::Status waited = patience.WaitFor(socket, POLLIN); !waited.ok()) return waited;
  constexpr char kHandshake = 0x16;
  char first = kHandshake;
  if (::recv(socket, &first, 1, MSG_PEEK) != 1 || first == kHandshake) return absl::OkStatus();
  return Error(absl::StatusCode::kUnauthenticated, "PEER_NOT_PROVEN",
               "it does not speak TLS, and this daemon does (--peer_tls_ca, "
               "--peer_tls_certificate, --peer_tls_key)");
}

}  // namespace

PeerConnections::PeerConnections(int32_t node, const PeerProofs& proofs,
                                 const PeerCredentials& credentials)
    : node_(node), proofs_(proofs), credentials_(credentials), stop_(::eventfd(0, EFD_CLOEXEC)) {}

Patience PeerConnections::PatienceFromNow() const {
  return {.until = std::chrono::steady_clock::now() + kUnprovenMax, .cancel = stop_.get()};
}

absl::StatusOr<PeerConnections::Proven> PeerConnections::Prove(wire::UniqueFd socket) {
  SetUpTcp(socket.get());
  const TlsContext context = credentials_.context();
  if (context == nullptr) {
    PlainStream stream(std::move(socket), PatienceFromNow());
    const absl::StatusOr<int32_t> node = ProveCaller(proofs_, node_, stream);
    if (!node.ok()) return node.status();
    return Proven{stream.Release(), *node};
  }
  const Patience patience = PatienceFromNow();
  if (absl::Status began = BeginsTls(socket.get(), patience); !began.ok()) return began;
  absl::StatusOr<std::unique_ptr<TlsStream>> stream =
      TlsStream::Accept(context, std::move(socket), patience);
  if (!stream.ok()) return stream.status();
  const absl::StatusOr<int32_t> node = ProveCaller(proofs_, node_, **stream);
  if (!node.ok()) return node.status();
  absl::StatusOr<wire::UniqueFd> plain = pumps_.Start(*std::move(stream));
  if (!plain.ok()) return plain.status();
  return Proven{*std::move(plain), *node};
}

absl::StatusOr<wire::UniqueFd> PeerConnections::Connect(const std::string& address,
                                                        int32_t callee) {
  absl::StatusOr<wire::UniqueFd> connected = TryConnect(address, callee);
  if (connected.ok() || absl::IsCancelled(connected.status())) return connected;
  const bool unproven = absl::IsUnauthenticated(connected.status());
  return Error(unproven ? absl::StatusCode::kUnauthenticated : absl::StatusCode::kUnavailable,
               unproven ? "PEER_NOT_PROVEN" : "PEER_LOST",
               Say("no connection to node ", Named("node", callee), " at ",
                   Named("address", address), ": ", scheduler::MessageOf(connected.status())));
}

absl::StatusOr<wire::UniqueFd> PeerConnections::TryConnect(const std::string& address,
                                                           int32_t callee) {
  const Patience patience = PatienceFromNow();
  absl::StatusOr<wire::UniqueFd> socket = ConnectTcp(address, patience);
  if (!socket.ok()) return socket;
  const Patience to_prove = PatienceFromNow();
  const TlsContext context = credentials_.context();
  if (context == nullptr) {
    PlainStream stream(*std::move(socket), to_prove);
    if (absl::Status proven = ProveCallee(proofs_, node_, callee, stream); !proven.ok()) {
      return proven;
    }
    return stream.Release();
  }
  // With names of the nodes, the certificate must have the callee's; else the address'.
  const std::string host = proofs_.tls_names.empty() ? HostOf(address) : "";
  absl::StatusOr<std::unique_ptr<TlsStream>> stream =
      TlsStream::Connect(context, *std::move(socket), host, to_prove);
  if (!stream.ok()) return stream.status();
  if (absl::Status proven = ProveCallee(proofs_, node_, callee, **stream); !proven.ok()) {
    return proven;
  }
  return pumps_.Start(*std::move(stream));
}

void PeerConnections::Stop() {
  const uint64_t one = 1;
  // Fails only when the counter is full, and then it is readable already.
  [[maybe_unused]] const ssize_t written = ::write(stop_.get(), &one, sizeof(one));
}

}  // namespace dmuond::server
