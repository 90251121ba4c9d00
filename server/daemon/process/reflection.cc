#include "server/daemon/process/reflection.h"

#include <grpcpp/impl/server_builder_plugin.h>

#include <vector>

namespace dmuond::server {
namespace {

class RemovePlugins final : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments* /*arguments*/) override {}
  // Reflection is the only one that this program links. Whichever came by another library, a server
  // that answers what nobody asked for is worse.
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    plugins->clear();
  }
};

}  // namespace

std::unique_ptr<grpc::ServerBuilderOption> WithoutReflection() {
  return std::make_unique<RemovePlugins>();
}

}  // namespace dmuond::server
