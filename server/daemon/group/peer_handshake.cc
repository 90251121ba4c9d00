#include "server/daemon/group/peer_handshake.h"

#include "server/common/errors.h"

namespace dmuond::server {

absl::Status ProveMember(const PeerProofs& proofs, const v1::JoinRequest& join,
                         const grpc::ServerContext& context, MemberServerStream& stream) {
  absl::Status named = CheckNodeName(*context.auth_context(), proofs.tls_names, join.node());
  if (!named.ok() || !proofs.secret.has_value()) return named;
  const auto refuse = [&](const char* why) {
    return Error(absl::StatusCode::kUnauthenticated, "PEER_NOT_PROVEN",
                 Say("who joins as node ", Named("node", join.node()), " ", why,
                     ": all daemons of a group need the same --peer_secret_file"));
  };
  if (join.nonce().size() != kNonceBytes) return refuse("has no secret");
  v1::CoordinatorMessage question;
  *question.mutable_peer_challenge() = proofs.secret->Challenge(join);
  v1::MemberMessage answer;
  if (!stream.Write(question) || !stream.Read(&answer)) return refuse("does not prove itself");
  if (!answer.has_peer_answer() ||
      !proofs.secret->CheckAnswer(join, question.peer_challenge(), answer.peer_answer())) {
    return refuse("has another secret");
  }
  return absl::OkStatus();
}

bool ProveSelf(const PeerProofs& proofs, const v1::JoinRequest& join,
               CoordinatorClientStream& stream, std::string& unproven) {
  if (!proofs.secret.has_value()) return true;
  v1::CoordinatorMessage question;
  if (!stream.Read(&question)) return false;
  if (!question.has_peer_challenge() ||
      !proofs.secret->CheckChallenge(join, question.peer_challenge())) {
    unproven =
        "who listens at --coordinator does not know the group's secret: all daemons of a group "
        "need the same --peer_secret_file";
    return false;
  }
  v1::MemberMessage message;
  *message.mutable_peer_answer() = proofs.secret->Answer(join, question.peer_challenge());
  return stream.Write(message);
}

}  // namespace dmuond::server
