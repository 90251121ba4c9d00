#include "server/daemon/group/peer_secret.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_cat.h"

namespace dmuond::server {
namespace {

constexpr char kCallee[] = "dmuond: who listens to who connects";
constexpr char kCaller[] = "dmuond: who connects to who listens";

// Without randomness or memory nothing can be proven, and nothing may pass for proven.
void MustSucceed(bool succeeded, const char* what) {
  if (succeeded) return;
  std::fprintf(stderr, "dmuond: OpenSSL fails: %s\n", what);
  std::abort();
}

void AppendPart(std::string& text, absl::string_view part) {
  uint64_t size = part.size();
  for (int i = 0; i < 8; ++i, size >>= 8) text.push_back(static_cast<char>(size & 0xFF));
  text.append(part.data(), part.size());
}

std::vector<std::string> PartsOf(const v1::PeerHello& hello, const std::string& binding,
                                 const v1::PeerChallenge& challenge) {
  return {absl::StrCat(hello.node()),
          absl::StrCat(hello.callee()),
          hello.nonce(),
          binding,
          absl::StrCat(challenge.node()),
          challenge.nonce()};
}

}  // namespace

std::string NewNonce() {
  std::string nonce(kNonceBytes, '\0');
  MustSucceed(RAND_bytes(reinterpret_cast<unsigned char*>(nonce.data()),
                         static_cast<int>(nonce.size())) == 1,
              "RAND_bytes");
  return nonce;
}

std::string PeerSecret::Prove(absl::string_view label,
                              const std::vector<std::string>& parts) const {
  std::string text;
  AppendPart(text, label);
  for (const std::string& part : parts) AppendPart(text, part);
  std::string proof(EVP_MAX_MD_SIZE, '\0');
  unsigned int size = 0;
  MustSucceed(HMAC(EVP_sha256(), key_.data(), static_cast<int>(key_.size()),
                   reinterpret_cast<const unsigned char*>(text.data()), text.size(),
                   reinterpret_cast<unsigned char*>(proof.data()), &size) != nullptr,
              "HMAC");
  proof.resize(size);
  return proof;
}

bool PeerSecret::Proves(const std::string& proof, absl::string_view label,
                        const std::vector<std::string>& parts) const {
  const std::string right = Prove(label, parts);
  return proof.size() == right.size() &&
         CRYPTO_memcmp(proof.data(), right.data(), right.size()) == 0;
}

v1::PeerChallenge PeerSecret::Challenge(const v1::PeerHello& hello, int32_t node,
                                        const std::string& binding) const {
  v1::PeerChallenge challenge;
  challenge.set_node(node);
  challenge.set_nonce(NewNonce());
  challenge.set_proof(Prove(kCallee, PartsOf(hello, binding, challenge)));
  return challenge;
}

bool PeerSecret::CheckChallenge(const v1::PeerHello& hello, const std::string& binding,
                                const v1::PeerChallenge& challenge) const {
  return challenge.nonce().size() == kNonceBytes &&
         Proves(challenge.proof(), kCallee, PartsOf(hello, binding, challenge));
}

v1::PeerAnswer PeerSecret::Answer(const v1::PeerHello& hello, const std::string& binding,
                                  const v1::PeerChallenge& challenge) const {
  v1::PeerAnswer answer;
  answer.set_proof(Prove(kCaller, PartsOf(hello, binding, challenge)));
  return answer;
}

bool PeerSecret::CheckAnswer(const v1::PeerHello& hello, const std::string& binding,
                             const v1::PeerChallenge& challenge,
                             const v1::PeerAnswer& answer) const {
  return Proves(answer.proof(), kCaller, PartsOf(hello, binding, challenge));
}

}  // namespace dmuond::server
