// A gRPC channel over a connection that stands already (peer_connections.h). It makes no other one.
#ifndef DMUOND_SERVER_DAEMON_GROUP_PEER_CHANNEL_H_
#define DMUOND_SERVER_DAEMON_GROUP_PEER_CHANNEL_H_

#include <grpcpp/create_channel_posix.h>
#include <grpcpp/grpcpp.h>

#include <memory>

#include "base/unique_fd.h"

namespace dmuond::server {

[[nodiscard]] inline std::shared_ptr<grpc::Channel> ChannelOver(wire::UniqueFd connection) {
  return grpc::CreateInsecureChannelFromFd("dmuond", connection.Release());
}

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_PEER_CHANNEL_H_
