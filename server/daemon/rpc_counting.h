// Has a gRPC server count the calls that it answers.
#ifndef DMUOND_SERVER_DAEMON_RPC_COUNTING_H_
#define DMUOND_SERVER_DAEMON_RPC_COUNTING_H_

#include <grpcpp/grpcpp.h>

#include "server/daemon/rpc_counts.h"

namespace dmuond::server {

// Before the server is built. `counts` must outlive it. Calls of methods that it does not have, and
// those that end with their connection before there is an answer, are not counted.
void CountCalls(grpc::ServerBuilder& builder, RpcCounts& counts);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_RPC_COUNTING_H_
