// The gRPC services. Each translates its calls into Daemon's, and decides nothing. All calls are
// synchronous but the two that every trainer waits in at every step.
#ifndef DMUOND_SERVER_DAEMON_CALLS_SERVICES_H_
#define DMUOND_SERVER_DAEMON_CALLS_SERVICES_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "dmuond/v1/admin.grpc.pb.h"
#include "dmuond/v1/trainer.grpc.pb.h"
#include "server/common/errors.h"
#include "server/daemon/calls/attach_server.h"
#include "server/daemon/calls/grpc_socket.h"
#include "server/daemon/calls/stream_watch.h"
#include "server/daemon/daemon.h"
#include "server/daemon/process/readiness.h"

namespace dmuond::server {

// Fills in the reply, or turns the error into gRPC's: a service's method returns this.
template <typename Reply>
grpc::Status Answer(absl::StatusOr<Reply> result, Reply* reply) {
  if (!result.ok()) return ToGrpc(result.status());
  *reply = *std::move(result);
  return grpc::Status::OK;
}

// Calls of trainers. SubmitStep and WaitStep come by a completion queue, the others by threads.
class TrainerService : public v1::Trainer::WithAsyncMethod_SubmitStep<
                           v1::Trainer::WithAsyncMethod_WaitStep<v1::Trainer::Service>> {
 public:
  // Once, when its server has started. `queue` is the server's, brings QueuedCall::Event, and is
  // not shut down before the server.
  virtual void Serve(grpc::ServerCompletionQueue& queue) = 0;
};

// `socket` is that of the server which has the service. All must outlive it.
[[nodiscard]] std::unique_ptr<TrainerService> MakeTrainerService(Daemon& daemon,
                                                                 AttachServer& attach,
                                                                 GrpcSocket& socket,
                                                                 StreamWatch& streams);
// Whoever may connect may look. Calls that change something are for the users in `admins`, and each
// is logged with its caller; PERMISSION_DENIED (ADMIN_ONLY) for others. `drain` begins to end the
// process; it must not block.
[[nodiscard]] std::unique_ptr<v1::Admin::Service> MakeAdminService(Daemon& daemon,
                                                                   Readiness& readiness,
                                                                   GrpcSocket& socket,
                                                                   std::vector<uid_t> admins,
                                                                   std::function<void()> drain);

// On the trainers' socket: tells a dmuonctl of an older release where administration is now.
[[nodiscard]] std::unique_ptr<v1::Admin::Service> MakeAdminElsewhere(const std::string& path);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_SERVICES_H_
