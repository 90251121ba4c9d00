// The way to a daemon's Admin service.
#ifndef DMUOND_SERVER_CTL_CONNECTION_H_
#define DMUOND_SERVER_CTL_CONNECTION_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "dmuond/v1/admin.grpc.pb.h"
#include "server/ctl/command.h"

namespace dmuond::server::ctl {

// `address` without "unix:"; empty: $DMUOND_ADDRESS, else the default socket.
[[nodiscard]] std::string ResolveAddress(const std::string& address);
// To the socket for administration beside the trainers', `socket`. INVALID_ARGUMENT: no daemon can
// serve there, because the path is too long.
[[nodiscard]] absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(const std::string& socket);
// The error as FromGrpc() gives it, with a hint if nobody listens there.
[[nodiscard]] absl::Status Explain(const grpc::Status& status, const std::string& socket);

// A request about the job that --job names.
template <typename Request>
Request AboutJob(const Options& options) {
  Request request;
  request.set_job(options.job);
  return request;
}

// One call: Call(options, &v1::Admin::Stub::GetStatus, v1::GetStatusRequest()).
template <typename Request, typename Reply>
absl::StatusOr<Reply> Call(const Options& options,
                           grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*,
                                                                   const Request&, Reply*),
                           const Request& request) {
  ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel, Connect(options.address));
  v1::Admin::Stub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() +
                       absl::ToChronoMilliseconds(options.timeout));
  Reply reply;
  const grpc::Status status = (stub.*method)(&context, request, &reply);
  if (!status.ok()) return Explain(status, options.address);
  return reply;
}

}  // namespace dmuond::server::ctl

#endif  // DMUOND_SERVER_CTL_CONNECTION_H_
