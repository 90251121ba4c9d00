#include "server/daemon/group/peer_secret.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <cstdio>
#include <cstdlib>

namespace dmuond::server {
namespace {

constexpr char kCoordinator[] = "dmuond: node 0 to a member that joins";
constexpr char kMember[] = "dmuond: a member that joins to node 0";

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

std::vector<std::string> PartsOf(const v1::JoinRequest& join, const std::string& nonce) {
  return {join.SerializeAsString(), nonce};
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

v1::PeerChallenge PeerSecret::Challenge(const v1::JoinRequest& join) const {
  v1::PeerChallenge challenge;
  challenge.set_nonce(NewNonce());
  challenge.set_proof(Prove(kCoordinator, PartsOf(join, challenge.nonce())));
  return challenge;
}

bool PeerSecret::CheckChallenge(const v1::JoinRequest& join,
                                const v1::PeerChallenge& challenge) const {
  return challenge.nonce().size() == kNonceBytes &&
         Proves(challenge.proof(), kCoordinator, PartsOf(join, challenge.nonce()));
}

v1::PeerAnswer PeerSecret::Answer(const v1::JoinRequest& join,
                                  const v1::PeerChallenge& challenge) const {
  v1::PeerAnswer answer;
  answer.set_proof(Prove(kMember, PartsOf(join, challenge.nonce())));
  return answer;
}

bool PeerSecret::CheckAnswer(const v1::JoinRequest& join, const v1::PeerChallenge& challenge,
                             const v1::PeerAnswer& answer) const {
  return Proves(answer.proof(), kMember, PartsOf(join, challenge.nonce()));
}

}  // namespace dmuond::server
