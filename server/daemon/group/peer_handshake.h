// What both ends of a stream between daemons prove to each other before anything else is said:
// the member that it is the node which it says it is, the coordinator that it is of the group.
#ifndef DMUOND_SERVER_DAEMON_GROUP_PEER_HANDSHAKE_H_
#define DMUOND_SERVER_DAEMON_GROUP_PEER_HANDSHAKE_H_

#include <grpcpp/grpcpp.h>

#include <string>

#include "absl/status/status.h"
#include "dmuond/v1/peer.grpc.pb.h"
#include "server/daemon/group/peer_credentials.h"

namespace dmuond::server {

using MemberServerStream = grpc::ServerReaderWriter<v1::CoordinatorMessage, v1::MemberMessage>;
using CoordinatorClientStream = grpc::ClientReaderWriter<v1::MemberMessage, v1::CoordinatorMessage>;

// By the coordinator, when it has read `join`: by the certificate's name, by the group's secret, or
// by both, whatever the group has. UNAUTHENTICATED (PEER_NOT_PROVEN).
[[nodiscard]] absl::Status ProveMember(const PeerProofs& proofs, const v1::JoinRequest& join,
                                       const grpc::ServerContext& context,
                                       MemberServerStream& stream);

// By the member, when it has sent `join`. False: the stream is of no use; `unproven` then says what
// is wrong with the coordinator, or is empty where the stream has ended.
[[nodiscard]] bool ProveSelf(const PeerProofs& proofs, const v1::JoinRequest& join,
                             CoordinatorClientStream& stream, std::string& unproven);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_PEER_HANDSHAKE_H_
