#include "server/daemon/group/peer_credentials.h"

#include <grpc/grpc.h>

#include <cstdlib>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "server/common/errors.h"

namespace dmuond::server {
namespace {

// gRPC's own in C++ keep the certificate that they were made with.
class ReloadingCredentials final : public grpc::ServerCredentials {
 public:
  ReloadingCredentials(grpc_ssl_server_certificate_config_callback fetch, void* context)
      : credentials_(grpc_ssl_server_credentials_create_with_options(
            grpc_ssl_server_credentials_create_options_using_config_fetcher(
                GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY, fetch, context))) {}
  ~ReloadingCredentials() override { grpc_server_credentials_release(credentials_); }
  ReloadingCredentials(const ReloadingCredentials&) = delete;
  ReloadingCredentials& operator=(const ReloadingCredentials&) = delete;

  void SetAuthMetadataProcessor(
      const std::shared_ptr<grpc::AuthMetadataProcessor>& /*processor*/) override {
    std::abort();  // nobody here has one
  }

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), credentials_);
  }

  grpc_server_credentials* const credentials_;
};

}  // namespace

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
  absl::StatusOr<TlsPem> pem = ReadTlsFiles(files_, absl::Now());
  if (!pem.ok()) return pem.status();
  MutexLock lock(mutex_);
  pem_ = *std::move(pem);
  return absl::OkStatus();
}

absl::Time PeerCredentials::expires() const {
  MutexLock lock(mutex_);
  return pem_.expires;
}

std::shared_ptr<grpc::ServerCredentials> PeerCredentials::server() {
  if (!tls()) return grpc::InsecureServerCredentials();
  return std::make_shared<ReloadingCredentials>(Fetch, this);
}

grpc_ssl_certificate_config_reload_status PeerCredentials::Fetch(
    void* self, grpc_ssl_server_certificate_config** config) {
  *config = static_cast<PeerCredentials*>(self)->Newest();
  return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
}

grpc_ssl_server_certificate_config* PeerCredentials::Newest() const {
  MutexLock lock(mutex_);
  const grpc_ssl_pem_key_cert_pair pair{pem_.key.c_str(), pem_.certificate.c_str()};
  // It copies them. One address may have several listeners, each with what it fetched last, so that
  // "unchanged" is never said; daemons connect seldom.
  return grpc_ssl_server_certificate_config_create(pem_.ca.c_str(), &pair, 1);
}

std::shared_ptr<grpc::ChannelCredentials> PeerCredentials::channel() const {
  if (!tls()) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions options;
  MutexLock lock(mutex_);
  options.pem_root_certs = pem_.ca;
  options.pem_cert_chain = pem_.certificate;
  options.pem_private_key = pem_.key;
  return grpc::SslCredentials(options);
}

std::shared_ptr<grpc::Channel> ChannelTo(const std::string& address, int32_t node,
                                         const PeerCredentials& credentials,
                                         const PeerProofs& proofs) {
  grpc::ChannelArguments arguments;
  // http_proxy and https_proxy, which clusters set for the way out, are not for the group.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  if (!proofs.tls_names.empty()) arguments.SetSslTargetNameOverride(proofs.tls_names[node]);
  return grpc::CreateCustomChannel(address, credentials.channel(), arguments);
}

absl::Status CheckNodeName(const grpc::AuthContext& caller, const std::vector<std::string>& names,
                           int32_t node) {
  if (names.empty()) return absl::OkStatus();
  const bool known = node >= 0 && node < static_cast<int32_t>(names.size());
  std::vector<std::string> has;
  for (const grpc::string_ref& name : caller.FindPropertyValues(GRPC_X509_SAN_PROPERTY_NAME)) {
    has.emplace_back(name.data(), name.size());
    if (known && has.back() == names[node]) return absl::OkStatus();
  }
  return Error(absl::StatusCode::kUnauthenticated, "PEER_NOT_PROVEN",
               Say("the certificate of who says it is node ", Named("node", node),
                   " has the names '", Named("names", absl::StrJoin(has, ", ")), "', not '",
                   Named("name", known ? names[node] : ""), "' (--peer_tls_names)"));
}

}  // namespace dmuond::server
