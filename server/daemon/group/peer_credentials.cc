#include "server/daemon/group/peer_credentials.h"

#include <fstream>
#include <iterator>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/common/errors.h"

namespace dmuond::server {
namespace {

absl::StatusOr<std::string> ReadPem(const std::string& path) {
  std::ifstream file(path);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file.good() && text.empty()) {
    return Error(absl::StatusCode::kInvalidArgument, "TLS_FILE_INVALID",
                 Say("the TLS file '", Named("path", path), "' cannot be read"));
  }
  return text;
}

}  // namespace

bool IsLoopback(const std::string& address) {
  return address.empty() || absl::StartsWith(address, "127.") ||
         absl::StartsWith(address, "localhost:") || absl::StartsWith(address, "[::1]:");
}

absl::StatusOr<PeerCredentials> MakePeerCredentials(const TlsFiles& files, bool allow_plaintext,
                                                    const std::string& listen,
                                                    const std::string& coordinator) {
  const int given = static_cast<int>(!files.ca.empty()) +
                    static_cast<int>(!files.certificate.empty()) +
                    static_cast<int>(!files.key.empty());
  if (given == 0) {
    if (!allow_plaintext && (!IsLoopback(listen) || !IsLoopback(coordinator))) {
      return Error(
          absl::StatusCode::kFailedPrecondition, "PLAINTEXT_REFUSED",
          Say("daemons would speak plaintext beyond loopback (listening on '",
              Named("peer_listen", listen), "', coordinator '", Named("coordinator", coordinator),
              "'): give the TLS files, or --allow_plaintext_peers"));
    }
    return PeerCredentials{grpc::InsecureServerCredentials(), grpc::InsecureChannelCredentials()};
  }
  if (given != 3) {
    return Error(absl::StatusCode::kInvalidArgument, "TLS_FILE_INVALID",
                 "TLS between daemons needs all three: CA, certificate and key");
  }
  absl::StatusOr<std::string> ca = ReadPem(files.ca);
  if (!ca.ok()) return ca.status();
  absl::StatusOr<std::string> certificate = ReadPem(files.certificate);
  if (!certificate.ok()) return certificate.status();
  absl::StatusOr<std::string> key = ReadPem(files.key);
  if (!key.ok()) return key.status();
  grpc::SslServerCredentialsOptions server(
      GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  server.pem_root_certs = *ca;
  server.pem_key_cert_pairs.push_back({*key, *certificate});
  grpc::SslCredentialsOptions channel;
  channel.pem_root_certs = *ca;
  channel.pem_cert_chain = *certificate;
  channel.pem_private_key = *key;
  return PeerCredentials{grpc::SslServerCredentials(server), grpc::SslCredentials(channel)};
}

std::shared_ptr<grpc::Channel> ChannelTo(const std::string& address, int32_t node,
                                         const PeerCredentials& credentials,
                                         const PeerProofs& proofs) {
  grpc::ChannelArguments arguments;
  if (!proofs.tls_names.empty()) arguments.SetSslTargetNameOverride(proofs.tls_names[node]);
  return grpc::CreateCustomChannel(address, credentials.channel, arguments);
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
