// TLS files for tests, made by the openssl program.
#ifndef DMUOND_TESTS_SERVER_CERTIFICATES_H_
#define DMUOND_TESTS_SERVER_CERTIFICATES_H_

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace dmuond::testing {

// Certificates of two authorities, made by the openssl program.
class Certificates {
 public:
  Certificates() {
    std::string pattern = std::filesystem::temp_directory_path() / "dmuond-tls-XXXXXX";
    if (::mkdtemp(pattern.data()) == nullptr) std::abort();
    directory_ = pattern;
    for (const char* authority : {"ours", "theirs"}) {
      SelfSign(absl::StrCat(authority, "-ca"), kNewKey);
      Issue(authority, authority, "IP:127.0.0.1");
    }
  }
  // A certificate of "ours" with another name.
  void IssueNamed(const std::string& file, const std::string& dns_name) const {
    Issue("ours", file, "DNS:" + dns_name);
  }
  // `how`: further arguments of the signature.
  void Issue(const std::string& authority, const std::string& file, const std::string& name,
             const std::string& how = "") const {
    const std::string path = absl::StrCat(directory_, "/", file);
    const std::string by = absl::StrCat(directory_, "/", authority);
    std::ofstream(path + ".name") << "subjectAltName=" << name << "\n";
    Run(absl::StrCat("req -subj /CN=dmuond -nodes -newkey ", kNewKey, " -keyout ", path,
                     ".key -out ", path, ".csr"));
    Run(absl::StrCat("x509 -req -days 1 ", how, " -in ", path, ".csr -CA ", by, "-ca.pem -CAkey ",
                     by, "-ca.key -CAcreateserial -out ", path, ".pem -extfile ", path, ".name"));
  }
  // An authority of its own, with a key of this kind.
  void SelfSign(const std::string& file, const std::string& key) const {
    const std::string path = absl::StrCat(directory_, "/", file);
    Run(absl::StrCat("req -x509 -days 1 -subj /CN=", file, " -nodes -newkey ", key, " -keyout ",
                     path, ".key -out ", path, ".pem"));
  }
  ~Certificates() { std::filesystem::remove_all(directory_); }
  Certificates(const Certificates&) = delete;
  Certificates& operator=(const Certificates&) = delete;

  [[nodiscard]] std::vector<std::string> Flags(const std::string& certificate,
                                               const std::string& trusted) const {
    return {"--peer_tls_ca=" + directory_ + "/" + trusted + "-ca.pem",
            "--peer_tls_certificate=" + directory_ + "/" + certificate + ".pem",
            "--peer_tls_key=" + directory_ + "/" + certificate + ".key"};
  }
  // The same without a secret: names are the proof.
  [[nodiscard]] std::vector<std::string> NamedFlags(const std::string& certificate) const {
    std::vector<std::string> flags = Flags(certificate, "ours");
    flags.insert(flags.end(), {"--peer_tls_names=node{rank}.cluster", "--peer_secret_file="});
    return flags;
  }
  // Of a file by its name: "ours.pem", "ours.key", "ours-ca.pem".
  [[nodiscard]] std::string Path(const std::string& file) const { return directory_ + "/" + file; }
  [[nodiscard]] std::string Read(const std::string& file) const {
    std::ifstream in(directory_ + "/" + file);
    return {std::istreambuf_iterator<char>(in), {}};
  }

 private:
  static constexpr char kNewKey[] = "ec -pkeyopt ec_paramgen_curve:prime256v1";
  static void Run(const std::string& arguments) {
    ASSERT_EQ(std::system(("openssl " + arguments + " >/dev/null 2>&1").c_str()), 0) << arguments;
  }
  std::string directory_;
};

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_SERVER_CERTIFICATES_H_
