#include "server/daemon/group/peer_handshake.h"

#include <algorithm>
#include <array>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "server/common/errors.h"

namespace dmuond::server {
namespace {

constexpr absl::string_view kGreeting = "dmuond 1";
constexpr size_t kGreetingBytes = 8;
// What a message may have; none of those here has a quarter of it.
constexpr size_t kBytesMax = 4096;
constexpr char kWhoseAddress[] = ": is --coordinator or --peer_advertise another daemon's address?";
constexpr char kOneSecret[] = ": all daemons of a group need the same --peer_secret_file";

absl::Status NotProven(const scheduler::Message& why) {
  return Error(absl::StatusCode::kUnauthenticated, "PEER_NOT_PROVEN", why);
}

template <typename Message>
absl::Status Write(PeerStream& stream, const Message& message, absl::string_view before = "") {
  const std::string body = message.SerializeAsString();
  std::string text(before);
  text.push_back(static_cast<char>(body.size() >> 8));
  text.push_back(static_cast<char>(body.size() & 0xFF));
  return stream.Write(text += body);
}

template <typename Message>
absl::StatusOr<Message> Read(PeerStream& stream) {
  std::array<char, 2> length{};
  if (absl::Status read = stream.Read(length.data(), length.size()); !read.ok()) return read;
  const size_t size =
      (size_t{static_cast<uint8_t>(length[0])} << 8) + static_cast<uint8_t>(length[1]);
  Message message;
  std::string body(size, '\0');
  if (size <= kBytesMax) {
    if (absl::Status read = stream.Read(body.data(), body.size()); !read.ok()) return read;
    if (message.ParseFromString(body)) return message;
  }
  return NotProven(Say("what it says is no message of daemons"));
}

// Says nothing of what came instead: it may be anything.
absl::Status ReadGreeting(PeerStream& stream) {
  std::array<char, kGreetingBytes> greeting{};
  // A byte at first: whoever speaks something else may say no more than that.
  if (absl::Status read = stream.Read(greeting.data(), 1); !read.ok()) return read;
  constexpr char kTlsAlert = 0x15;
  constexpr char kTlsHandshake = 0x16;
  if (greeting[0] == kTlsAlert || greeting[0] == kTlsHandshake) {
    return NotProven(
        Say("it speaks TLS, and this daemon does not (--peer_tls_ca, "
            "--peer_tls_certificate, --peer_tls_key)"));
  }
  if (greeting[0] == kGreeting[0]) {
    if (absl::Status read = stream.Read(&greeting[1], kGreetingBytes - 1); !read.ok()) return read;
    if (absl::string_view(greeting.data(), greeting.size()) == kGreeting) return absl::OkStatus();
  }
  return NotProven(Say("it does not speak as this daemon does: it is none, or of another version"));
}

// Whether a certificate with these names is node `node`'s.
absl::Status CheckNames(const PeerProofs& proofs, int32_t node, const std::string& who,
                        const std::vector<std::string>& has) {
  const std::vector<std::string>& names = proofs.tls_names;
  if (names.empty()) return absl::OkStatus();
  const bool known = node >= 0 && node < static_cast<int32_t>(names.size());
  if (known && std::find(has.begin(), has.end(), names[node]) != has.end()) return absl::OkStatus();
  return NotProven(Say("the certificate of ", who, " has the names '",
                       Named("names", absl::StrJoin(has, ", ")), "', not '",
                       Named("name", known ? names[node] : ""), "' (--peer_tls_names)"));
}

}  // namespace

absl::StatusOr<int32_t> ProveCaller(const PeerProofs& proofs, int32_t node, PeerStream& stream) {
  if (absl::Status greeted = ReadGreeting(stream); !greeted.ok()) return greeted;
  const absl::StatusOr<v1::PeerHello> hello = Read<v1::PeerHello>(stream);
  if (!hello.ok()) return hello.status();
  if (hello->nonce().size() != kNonceBytes) return NotProven(Say("it has no nonce"));
  const std::string binding = stream.Binding();
  v1::PeerChallenge challenge;
  challenge.set_node(node);
  challenge.set_nonce(NewNonce());
  if (proofs.secret.has_value()) challenge = proofs.secret->Challenge(*hello, node, binding);
  if (absl::Status sent = Write(stream, challenge, kGreeting); !sent.ok()) return sent;
  const std::string who = absl::StrCat("who connects as node ", hello->node());
  if (hello->callee() != node) {  // the challenge says so
    return NotProven(Say(who, " looks for node ", Named("node", hello->callee()),
                         ", and this is node ", Named("other_node", node), kWhoseAddress));
  }
  const absl::StatusOr<v1::PeerAnswer> answer = Read<v1::PeerAnswer>(stream);
  if (absl::IsUnavailable(answer.status())) {
    return NotProven(Say(who, " does not prove itself", kOneSecret));
  }
  if (!answer.ok()) return answer.status();
  absl::Status refused = CheckNames(proofs, hello->node(), who, stream.PeerNames());
  if (refused.ok() && proofs.secret.has_value() &&
      !proofs.secret->CheckAnswer(*hello, binding, challenge, *answer)) {
    refused = NotProven(Say(who, " has another secret", kOneSecret));
  }
  v1::PeerVerdict verdict;
  if (!refused.ok()) verdict.set_refused(std::string(refused.message()));
  const absl::Status sent = Write(stream, verdict);
  if (!refused.ok()) return refused;
  if (!sent.ok()) return sent;
  return hello->node();
}

absl::Status ProveCallee(const PeerProofs& proofs, int32_t node, int32_t callee,
                         PeerStream& stream) {
  const std::string who = absl::StrCat("who listens at the address of node ", callee);
  if (absl::Status named = CheckNames(proofs, callee, who, stream.PeerNames()); !named.ok()) {
    return named;
  }
  v1::PeerHello hello;
  hello.set_node(node);
  hello.set_callee(callee);
  hello.set_nonce(NewNonce());
  if (absl::Status sent = Write(stream, hello, kGreeting); !sent.ok()) return sent;
  if (absl::Status greeted = ReadGreeting(stream); !greeted.ok()) return greeted;
  const absl::StatusOr<v1::PeerChallenge> challenge = Read<v1::PeerChallenge>(stream);
  if (!challenge.ok()) return challenge.status();
  const std::string binding = stream.Binding();
  v1::PeerAnswer answer;
  if (proofs.secret.has_value()) {
    if (!proofs.secret->CheckChallenge(hello, binding, *challenge)) {
      return NotProven(Say(who, " does not know the group's secret", kOneSecret));
    }
    answer = proofs.secret->Answer(hello, binding, *challenge);
  }
  if (challenge->node() != callee) {
    return NotProven(
        Say(who, " says that it is node ", Named("node", challenge->node()), kWhoseAddress));
  }
  if (absl::Status sent = Write(stream, answer); !sent.ok()) return sent;
  const absl::StatusOr<v1::PeerVerdict> verdict = Read<v1::PeerVerdict>(stream);
  if (!verdict.ok()) return verdict.status();
  if (verdict->refused().empty()) return absl::OkStatus();
  return NotProven(Say("node ", Named("node", callee),
                       " refuses this daemon: ", Named("why", verdict->refused())));
}

}  // namespace dmuond::server
