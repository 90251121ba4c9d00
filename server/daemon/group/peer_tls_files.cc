#include "server/daemon/group/peer_tls_files.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <sys/stat.h>

#include <algorithm>
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

class Reading {
 public:
  Reading(const TlsFiles& files, absl::Time now) : files_(files), now_(now) {}

  absl::StatusOr<TlsPem> Run() {
    TlsPem pem;
    pem.expires = absl::InfiniteFuture();
    pem.ca = Read(kCaFlag, files_.ca);
    pem.certificate = Read(kCertificateFlag, files_.certificate);
    pem.key = Read(kKeyFlag, files_.key);
    Certificates(kCaFlag, files_.ca, pem.ca, pem.expires);
    const Certificate own =
        Certificates(kCertificateFlag, files_.certificate, pem.certificate, pem.expires);
    PrivateKey(pem.key, own.get());
    if (mistakes_.empty()) return pem;
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
  std::vector<std::string> mistakes_;
};

}  // namespace

absl::StatusOr<TlsPem> ReadTlsFiles(const TlsFiles& files, absl::Time now) {
  if (files.ca.empty() || files.certificate.empty() || files.key.empty()) {
    return Error(absl::StatusCode::kInvalidArgument, "TLS_FILE_INVALID",
                 "--peer_tls_ca, --peer_tls_certificate and --peer_tls_key go together: "
                 "give all three or none");
  }
  return Reading(files, now).Run();
}

}  // namespace dmuond::server
