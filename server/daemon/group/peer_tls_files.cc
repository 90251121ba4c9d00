#include "server/daemon/group/peer_tls_files.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/common/errors.h"
#include "server/common/whole_file.h"
#include "server/daemon/group/openssl_objects.h"

namespace dmuond::server {
namespace {

constexpr char kCaFlag[] = "peer_tls_ca";
constexpr char kCertificateFlag[] = "peer_tls_certificate";
constexpr char kKeyFlag[] = "peer_tls_key";

// OpenSSL asks the terminal for a passphrase where it is given no function.
int NoPassphrase(char* /*buffer*/, int /*size*/, int /*writes*/, void* asked) {
  *static_cast<bool*>(asked) = true;
  return -1;
}

std::string Day(absl::Time time) {
  return absl::FormatTime("%Y-%m-%d %H:%M:%S UTC", time, absl::UTCTimeZone());
}

absl::Time ToTime(const ASN1_TIME* time) {
  std::tm parts{};
  return ASN1_TIME_to_tm(time, &parts) == 1 ? absl::FromTM(parts, absl::UTCTimeZone())
                                            : absl::InfinitePast();
}

// The first certificate is taken by `first`, all others by `others`.
bool TakeCertificates(const std::string& text, const auto& first, const auto& others) {
  const Bio bio = Reader(text);
  bool taken = false;
  for (;;) {
    const Certificate next(PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr));
    if (next == nullptr) {
      ERR_clear_error();
      return taken;
    }
    if ((taken ? others(next.get()) : first(next.get())) != 1) return false;
    taken = true;
  }
}

// What the files hold.
struct TlsPem {
  std::string ca;
  std::string certificate;
  std::string key;
};

absl::StatusOr<TlsContext> MakeTlsContext(const TlsPem& pem) {
  ERR_clear_error();
  TlsContext context(SSL_CTX_new(TLS_method()), SSL_CTX_free);
  const auto failed = [](const char* what) {
    return absl::InvalidArgumentError(
        absl::StrCat("is of no use: OpenSSL takes no ", what, ": ", WhatOpenSslSays()));
  };
  if (context == nullptr) return failed("settings");
  SSL_CTX* const ssl = context.get();
  X509_STORE* const authorities = SSL_CTX_get_cert_store(ssl);
  const auto trust = [&](X509* one) { return X509_STORE_add_cert(authorities, one); };
  if (!TakeCertificates(pem.ca, trust, trust)) return failed("authority");
  // What --peer_tls_ca holds is trusted, one that another authority has signed, too.
  X509_STORE_set_flags(authorities, X509_V_FLAG_PARTIAL_CHAIN | X509_V_FLAG_TRUSTED_FIRST);
  if (!TakeCertificates(
          pem.certificate, [&](X509* own) { return SSL_CTX_use_certificate(ssl, own); },
          [&](X509* above) { return static_cast<int>(SSL_CTX_add1_chain_cert(ssl, above)); })) {
    return failed("certificate");
  }
  const Bio key_text = Reader(pem.key);
  const Key key(PEM_read_bio_PrivateKey(key_text.get(), nullptr, nullptr, nullptr));
  if (key == nullptr || SSL_CTX_use_PrivateKey(ssl, key.get()) != 1) return failed("key");
  SSL_CTX_set_min_proto_version(ssl, TLS1_3_VERSION);
  SSL_CTX_set_session_cache_mode(ssl, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_num_tickets(ssl, 0);
  SSL_CTX_set_verify(ssl, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  SSL_CTX_set_mode(ssl, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  return context;
}

// Some certificates and keys are taken, and no handshake of TLS 1.3 can use them. Whom it trusts is
// not asked: the other end is this one.
absl::Status ShakeHandsWithItself(SSL_CTX* context) {
  ERR_clear_error();
  BIO* here = nullptr;
  BIO* there = nullptr;
  const Ssl server(SSL_new(context));
  const Ssl client(SSL_new(context));
  if (server == nullptr || client == nullptr || BIO_new_bio_pair(&here, 0, &there, 0) != 1) {
    return absl::ResourceExhaustedError("cannot be tried: OpenSSL has no memory");
  }
  SSL_set_bio(server.get(), here, here);
  SSL_set_bio(client.get(), there, there);
  SSL_set_accept_state(server.get());
  SSL_set_connect_state(client.get());
  for (SSL* const end : {server.get(), client.get()}) {
    SSL_set_verify(end, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT,
                   [](int /*trusted*/, X509_STORE_CTX* /*chain*/) { return 1; });
  }
  bool shaken = false;
  while (!shaken) {
    shaken = true;
    for (SSL* const end : {client.get(), server.get()}) {
      const int result = SSL_do_handshake(end);
      if (result == 1) continue;
      shaken = false;
      const int error = SSL_get_error(end, result);
      if (error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE) {
        return absl::InvalidArgumentError(
            absl::StrCat("is of no use for TLS 1.3: ", WhatOpenSslSays()));
      }
    }
  }
  return absl::OkStatus();
}

// How strong OpenSSL wants keys and signatures to be here, in bits of a cipher's key: its settings
// have a level from 0 to 5.
int StrengthWanted() {
  constexpr std::array<int, 6> kBits = {0, 80, 112, 128, 192, 256};
  const TlsContext context(SSL_CTX_new(TLS_method()), SSL_CTX_free);
  const int level = context == nullptr ? 0 : SSL_CTX_get_security_level(context.get());
  return kBits[static_cast<size_t>(std::clamp(level, 0, 5))];
}

class Reading {
 public:
  Reading(const TlsFiles& files, absl::Time now) : files_(files), now_(now) {}

  absl::StatusOr<PeerTls> Run() {
    TlsPem pem;
    PeerTls tls;
    tls.expires = absl::InfiniteFuture();
    pem.ca = Read(kCaFlag, files_.ca);
    pem.certificate = Read(kCertificateFlag, files_.certificate);
    pem.key = Read(kKeyFlag, files_.key);
    Certificates(kCaFlag, files_.ca, pem.ca, tls.expires);
    const Certificate own =
        Certificates(kCertificateFlag, files_.certificate, pem.certificate, tls.expires);
    PrivateKey(pem.key, own.get());
    if (mistakes_.empty()) {
      absl::StatusOr<TlsContext> context = MakeTlsContext(pem);
      absl::Status works = context.status();
      if (works.ok()) works = ShakeHandsWithItself(context->get());
      if (!works.ok()) Wrong(kCertificateFlag, files_.certificate, works.message());
      if (works.ok()) tls.context = *std::move(context);
    }
    if (mistakes_.empty()) return tls;
    return Error(absl::StatusCode::kInvalidArgument, "TLS_FILE_INVALID",
                 absl::StrJoin(mistakes_, "\n"));
  }

 private:
  void Wrong(const char* flag, const std::string& path, absl::string_view why) {
    mistakes_.push_back(absl::StrCat("--", flag, "=", path, " ", why));
  }

  // Empty: it was wrong.
  std::string Read(const char* flag, const std::string& path) {
    absl::StatusOr<std::string> text = WholeFile(path);
    if (!text.ok()) {
      Wrong(flag, path, text.status().message());
      return "";
    }
    if (text->empty()) Wrong(flag, path, "is empty");
    return *std::move(text);
  }

  // Returns the first one. Null: it is wrong, which was said.
  Certificate Certificates(const char* flag, const std::string& path, const std::string& text,
                           absl::Time& expires) {
    if (text.empty()) return nullptr;
    const Bio bio = Reader(text);
    Certificate first;
    for (int number = 1;; ++number) {
      ERR_clear_error();
      Certificate next(PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr));
      if (next == nullptr) {
        const bool at_end = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
        ERR_clear_error();
        if (!at_end) {
          Wrong(flag, path, absl::StrCat("is broken: certificate ", number, " in it is no PEM"));
          return nullptr;
        }
        if (first == nullptr) Wrong(flag, path, "holds no certificate in PEM");
        return first;
      }
      if (!IsValidNow(flag, path, *next, expires)) return nullptr;
      if (!IsStrong(flag, path, next.get())) return nullptr;
      if (first == nullptr) first = std::move(next);
    }
  }

  bool IsValidNow(const char* flag, const std::string& path, const X509& certificate,
                  absl::Time& expires) {
    const absl::Time begins = ToTime(X509_get0_notBefore(&certificate));
    const absl::Time ends = ToTime(X509_get0_notAfter(&certificate));
    expires = std::min(expires, ends);
    if (now_ > ends) {
      Wrong(flag, path, absl::StrCat("has expired on ", Day(ends), "; it is ", Day(now_), " here"));
      return false;
    }
    if (now_ < begins) {
      Wrong(flag, path,
            absl::StrCat("is valid from ", Day(begins), " on, and it is ", Day(now_),
                         " here: is this machine's clock right?"));
      return false;
    }
    return true;
  }

  // OpenSSL refuses a weak one in some handshakes alone, and says there which of many it was to
  // nobody.
  bool IsStrong(const char* flag, const std::string& path, X509* certificate) {
    const EVP_PKEY* const key = X509_get0_pubkey(certificate);
    const int key_bits = key == nullptr ? 0 : EVP_PKEY_get_security_bits(key);
    if (key_bits < strength_) {
      const char* const type = key == nullptr ? nullptr : EVP_PKEY_get0_type_name(key);
      Wrong(flag, path,
            absl::StrCat("is too weak: a key of ", key == nullptr ? 0 : EVP_PKEY_get_bits(key),
                         " bits", type == nullptr ? "" : absl::StrCat(" (", type, ")"),
                         " is as strong as ", key_bits, " bits of a cipher, and OpenSSL asks for ",
                         strength_, " here: RSA of 2048 bits or more, or P-256"));
      return false;
    }
    int digest = NID_undef;
    int signature_bits = 0;
    // Nobody looks at an authority's signature: it is trusted as it is.
    if (flag == kCertificateFlag && (X509_get_extension_flags(certificate) & EXFLAG_SS) == 0 &&
        X509_get_signature_info(certificate, &digest, nullptr, &signature_bits, nullptr) == 1 &&
        signature_bits < strength_) {
      Wrong(flag, path,
            absl::StrCat("is too weak: its signature is of ",
                         digest == NID_undef ? "an unknown digest" : OBJ_nid2sn(digest),
                         ": have it signed with SHA-256 or more"));
      return false;
    }
    return true;
  }

  void PrivateKey(const std::string& text, X509* certificate) {
    if (text.empty()) return;
    struct stat status {};
    if (::stat(files_.key.c_str(), &status) == 0 && (status.st_mode & 0007) != 0) {
      Wrong(kKeyFlag, files_.key, "is open to everybody: chmod o= it");
    }
    const Bio bio = Reader(text);
    bool passphrase = false;
    const Key key(PEM_read_bio_PrivateKey(bio.get(), nullptr, NoPassphrase, &passphrase));
    ERR_clear_error();
    if (key == nullptr) {
      Wrong(kKeyFlag, files_.key,
            passphrase ? "has a passphrase, which a daemon cannot be asked for"
                       : "holds no private key in PEM");
    } else if (certificate != nullptr && X509_check_private_key(certificate, key.get()) != 1) {
      ERR_clear_error();
      Wrong(kKeyFlag, files_.key,
            absl::StrCat("is not the key of --", kCertificateFlag, "=", files_.certificate));
    }
  }

  const TlsFiles& files_;
  const absl::Time now_;
  const int strength_ = StrengthWanted();
  std::vector<std::string> mistakes_;
};

}  // namespace

absl::StatusOr<PeerTls> ReadTlsFiles(const TlsFiles& files, absl::Time now) {
  if (files.ca.empty() || files.certificate.empty() || files.key.empty()) {
    return Error(absl::StatusCode::kInvalidArgument, "TLS_FILE_INVALID",
                 "--peer_tls_ca, --peer_tls_certificate and --peer_tls_key go together: "
                 "give all three or none");
  }
  return Reading(files, now).Run();
}

}  // namespace dmuond::server
