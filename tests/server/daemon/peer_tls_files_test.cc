#include "server/daemon/group/peer_tls_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/common/errors.h"
#include "tests/server/certificates.h"
#include "tests/server/daemon/support.h"

namespace dmuond::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class PeerTlsFilesTest : public ::testing::Test {
 protected:
  PeerTlsFilesTest() {
    files_ = {certificates_.Path("ours-ca.pem"), certificates_.Path("ours.pem"),
              certificates_.Path("ours.key")};
  }
  std::string Mistake(absl::Time now = absl::Now()) const {
    const absl::Status status = ReadTlsFiles(files_, now).status();
    EXPECT_EQ(ReasonOf(status), "TLS_FILE_INVALID") << status;
    return std::string(status.message());
  }
  // A file of its own with this text, open to its owner alone.
  std::string Written(const std::string& name, const std::string& text) const {
    WriteFile(dir_ / name, text);
    EXPECT_EQ(::chmod((dir_ / name).c_str(), 0600), 0);
    return dir_ / name;
  }

  const dmuond::testing::Certificates certificates_;
  const TempDir dir_;
  TlsFiles files_;
};

TEST_F(PeerTlsFilesTest, ThoseThatFitAreRead) {
  const auto tls = ReadTlsFiles(files_, absl::Now());
  ASSERT_TRUE(tls.ok()) << tls.status();
  EXPECT_NE(tls->context, nullptr);
  EXPECT_GT(tls->expires, absl::Now() + absl::Hours(20));
  EXPECT_LT(tls->expires, absl::Now() + absl::Hours(25));
  // A chain, and a bundle of authorities.
  files_.certificate =
      Written("chain", certificates_.Read("ours.pem") + certificates_.Read("ours-ca.pem"));
  files_.ca =
      Written("bundle", certificates_.Read("theirs-ca.pem") + certificates_.Read("ours-ca.pem"));
  EXPECT_TRUE(ReadTlsFiles(files_, absl::Now()).ok());
}

TEST_F(PeerTlsFilesTest, OneThatIsMissingEmptyOrNoPemIsNamed) {
  files_.ca = "/nowhere/ca";
  EXPECT_THAT(Mistake(), HasSubstr("--peer_tls_ca=/nowhere/ca cannot be read: No such file"));
  files_.ca = Written("empty", "");
  EXPECT_THAT(Mistake(), HasSubstr(absl::StrCat("--peer_tls_ca=", files_.ca, " is empty")));
  files_.ca = Written("garbage", "no PEM at all");
  EXPECT_THAT(Mistake(), HasSubstr(absl::StrCat(files_.ca, " holds no certificate in PEM")));
  files_.ca = certificates_.Path("ours-ca.pem");

  std::string broken = certificates_.Read("ours.pem");
  broken[broken.size() / 2] = '!';
  files_.certificate = Written("broken", certificates_.Read("ours.pem") + broken);
  EXPECT_THAT(Mistake(), HasSubstr(absl::StrCat("--peer_tls_certificate=", files_.certificate,
                                                " is broken: certificate 2")));
  files_.certificate = certificates_.Path("ours.pem");
  files_.key = Written("key", certificates_.Read("ours.pem"));
  EXPECT_THAT(Mistake(), HasSubstr(absl::StrCat("--peer_tls_key=", files_.key,
                                                " holds no private key in PEM")));
}

TEST_F(PeerTlsFilesTest, AKeyThatIsAnotherCertificatesOpenToAllOrNeedsAPassphraseIsNamed) {
  files_.key = certificates_.Path("theirs.key");
  EXPECT_THAT(Mistake(), HasSubstr(absl::StrCat(
                             "--peer_tls_key=", files_.key,
                             " is not the key of --peer_tls_certificate=", files_.certificate)));
  files_.key = Written("key", certificates_.Read("ours.key"));
  ASSERT_EQ(::chmod(files_.key.c_str(), 0644), 0);
  EXPECT_THAT(Mistake(), HasSubstr(files_.key + " is open to everybody: chmod o= it"));
  ASSERT_EQ(::chmod(files_.key.c_str(), 0640), 0);
  EXPECT_TRUE(ReadTlsFiles(files_, absl::Now()).ok()) << "a group may have it";
  const std::string locked = dir_ / "locked";
  ASSERT_EQ(std::system(absl::StrCat("openssl ec -aes256 -passout pass:x -in ", files_.key,
                                     " -out ", locked, " >/dev/null 2>&1 && chmod 600 ", locked)
                            .c_str()),
            0);
  files_.key = locked;
  EXPECT_THAT(Mistake(), HasSubstr(locked + " has a passphrase"));
}

// OpenSSL refuses these in handshakes, the authority's on the other daemons.
TEST_F(PeerTlsFilesTest, WhatIsTooWeakForTlsIsNamed) {
  const auto made = [&](const std::string& name, const std::string& key) {
    certificates_.SelfSign(name, key);
    return certificates_.Path(name + ".pem");
  };
  const std::string weak = made("weak", "rsa:1024");
  files_.certificate = weak;
  files_.key = certificates_.Path("weak.key");
  EXPECT_THAT(Mistake(),
              HasSubstr(absl::StrCat("--peer_tls_certificate=", weak,
                                     " is too weak: a key of 1024 bits (RSA) is as strong as 80 "
                                     "bits of a cipher, and OpenSSL asks for 112 here")));
  files_.certificate = certificates_.Path("ours.pem");
  files_.key = certificates_.Path("ours.key");
  files_.ca = weak;
  EXPECT_THAT(Mistake(), HasSubstr(absl::StrCat("--peer_tls_ca=", weak, " is too weak")));
  files_.ca = certificates_.Path("ours-ca.pem");
  certificates_.Issue("ours", "sha1", "IP:127.0.0.1", "-sha1");
  files_.certificate = certificates_.Path("sha1.pem");
  files_.key = certificates_.Path("sha1.key");
  EXPECT_THAT(Mistake(), HasSubstr("sha1.pem is too weak: its signature is of SHA1"));
  // Strong enough, and no curve of TLS 1.3.
  files_.certificate = made("curve", "ec -pkeyopt ec_paramgen_curve:secp256k1");
  files_.key = certificates_.Path("curve.key");
  EXPECT_THAT(Mistake(), HasSubstr("curve.pem is of no use"));
}

TEST_F(PeerTlsFilesTest, ExpiryAndAClockThatIsWrongAreToldApart) {
  EXPECT_THAT(
      Mistake(absl::Now() + absl::Hours(48)),
      AllOf(HasSubstr(files_.ca + " has expired on "),
            HasSubstr(files_.certificate + " has expired on "), Not(HasSubstr(files_.key))));
  EXPECT_THAT(Mistake(absl::Now() - absl::Hours(48)),
              AllOf(HasSubstr(files_.certificate + " is valid from "), HasSubstr("clock")));
}

}  // namespace
}  // namespace dmuond::server
