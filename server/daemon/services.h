// The gRPC services, each a thin translation of calls into Daemon's: what is decided is decided
// there. Synchronous: a waiting call holds one thread, and a node has tens of trainers at most.
#ifndef DMUOND_SERVER_DAEMON_SERVICES_H_
#define DMUOND_SERVER_DAEMON_SERVICES_H_

#include <functional>
#include <memory>

#include "dmuond/v1/admin.grpc.pb.h"
#include "dmuond/v1/trainer.grpc.pb.h"
#include "server/daemon/daemon.h"

namespace dmuond::server {

[[nodiscard]] std::unique_ptr<v1::Trainer::Service> MakeTrainerService(Daemon& daemon);
// `drain` begins to end the process; it must not block.
[[nodiscard]] std::unique_ptr<v1::Admin::Service> MakeAdminService(Daemon& daemon,
                                                                   std::function<void()> drain);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_SERVICES_H_
