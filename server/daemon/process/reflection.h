// gRPC's reflection library adds reflection to every server of a process that links it. So a server
// that is not to have it says so.
#ifndef DMUOND_SERVER_DAEMON_PROCESS_REFLECTION_H_
#define DMUOND_SERVER_DAEMON_PROCESS_REFLECTION_H_

#include <grpcpp/impl/server_builder_option.h>

#include <memory>

namespace dmuond::server {

// For ServerBuilder::SetOption(): the server answers no reflection.
[[nodiscard]] std::unique_ptr<grpc::ServerBuilderOption> WithoutReflection();

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_PROCESS_REFLECTION_H_
