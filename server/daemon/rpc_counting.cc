#include "server/daemon/rpc_counting.h"

#include <grpcpp/support/server_interceptor.h>

#include <memory>
#include <utility>
#include <vector>

#include "server/common/errors.h"

namespace dmuond::server {
namespace {

namespace interception = grpc::experimental;

class Counting final : public interception::Interceptor {
 public:
  Counting(const char* method, RpcCounts& counts) : method_(method), counts_(counts) {}
  void Intercept(interception::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(
            interception::InterceptionHookPoints::PRE_SEND_STATUS)) {
      counts_.Add(method_, FromGrpc(methods->GetSendStatus()));
    }
    methods->Proceed();
  }

 private:
  const char* const method_;  // the server's
  RpcCounts& counts_;
};

class CountingFactory final : public interception::ServerInterceptorFactoryInterface {
 public:
  explicit CountingFactory(RpcCounts& counts) : counts_(counts) {}
  interception::Interceptor* CreateServerInterceptor(interception::ServerRpcInfo* info) override {
    return new Counting(info->method(), counts_);
  }

 private:
  RpcCounts& counts_;
};

}  // namespace

void CountCalls(grpc::ServerBuilder& builder, RpcCounts& counts) {
  std::vector<std::unique_ptr<interception::ServerInterceptorFactoryInterface>> creators;
  creators.push_back(std::make_unique<CountingFactory>(counts));
  builder.experimental().SetInterceptorCreators(std::move(creators));
}

}  // namespace dmuond::server
