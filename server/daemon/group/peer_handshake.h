// The proofs at the beginning of a stream between daemons, before anything else is said: the member
// proves that it is the node that it claims to be, and the coordinator that it belongs to the
// group.
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

// The coordinator calls this when it has read `join`. The member is checked by its certificate's
// name and by the group's secret, as far as the group has them. UNAUTHENTICATED (PEER_NOT_PROVEN).
[[nodiscard]] absl::Status ProveMember(const PeerProofs& proofs, const v1::JoinRequest& join,
                                       const grpc::ServerContext& context,
                                       MemberServerStream& stream);

// The member calls this when it has sent `join`. False: the stream is of no use. `unproven` then
// says what is wrong with the coordinator; it is empty if the stream has ended.
[[nodiscard]] bool ProveSelf(const PeerProofs& proofs, const v1::JoinRequest& join,
                             CoordinatorClientStream& stream, std::string& unproven);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_PEER_HANDSHAKE_H_
