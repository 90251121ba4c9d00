// The gRPC services, each a thin translation of calls into Daemon's: what is decided is decided
// there. Synchronous: a waiting call holds one thread, and a node has tens of trainers at most.
#ifndef DMUOND_SERVER_DAEMON_CALLS_SERVICES_H_
#define DMUOND_SERVER_DAEMON_CALLS_SERVICES_H_

#include <functional>
#include <memory>
#include <string>

#include "dmuond/v1/admin.grpc.pb.h"
#include "dmuond/v1/trainer.grpc.pb.h"
#include "server/daemon/calls/attach_server.h"
#include "server/daemon/calls/grpc_socket.h"
#include "server/daemon/calls/stream_watch.h"
#include "server/daemon/daemon.h"

namespace dmuond::server {

// `socket` is that of the server which has the service. All must outlive it.
[[nodiscard]] std::unique_ptr<v1::Trainer::Service> MakeTrainerService(Daemon& daemon,
                                                                       AttachServer& attach,
                                                                       GrpcSocket& socket,
                                                                       StreamWatch& streams);
// `drain` begins to end the process; it must not block.
[[nodiscard]] std::unique_ptr<v1::Admin::Service> MakeAdminService(Daemon& daemon,
                                                                   std::function<void()> drain);

// On the trainers' socket, for a dmuonctl of an older release: where administration is now.
[[nodiscard]] std::unique_ptr<v1::Admin::Service> MakeAdminElsewhere(const std::string& path);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_SERVICES_H_
