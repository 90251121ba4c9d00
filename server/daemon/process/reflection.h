// gRPC's reflection is a plugin that its library adds to every server of the process that links it:
// each of ours says whether it is to have it.
#ifndef DMUOND_SERVER_DAEMON_PROCESS_REFLECTION_H_
#define DMUOND_SERVER_DAEMON_PROCESS_REFLECTION_H_

#include <grpcpp/impl/server_builder_option.h>

#include <memory>

namespace dmuond::server {

// For ServerBuilder::SetOption(): the server answers no reflection.
[[nodiscard]] std::unique_ptr<grpc::ServerBuilderOption> WithoutReflection();

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_PROCESS_REFLECTION_H_
