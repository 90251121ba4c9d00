// What a daemon says of itself, for tests that wait for something to be so.
#ifndef DMUOND_TESTS_SERVER_SYSTEM_DAEMON_STATUS_H_
#define DMUOND_TESTS_SERVER_SYSTEM_DAEMON_STATUS_H_

#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "dmuond/v1/admin.grpc.pb.h"
#include "grpcpp/grpcpp.h"
#include "tests/client/daemon_process.h"

namespace dmuond::testing {

class DaemonStatus {
 public:
  explicit DaemonStatus(const std::string& address) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, "localhost");
    stub_ = v1::Admin::NewStub(grpc::CreateCustomChannel(
        absl::StrCat("unix:", address, ".admin"), grpc::InsecureChannelCredentials(), arguments));
  }
  // Empty when nobody answers.
  v1::GetStatusReply Get() { return Ask(&v1::Admin::Stub::GetStatus, v1::GetStatusRequest()); }
  v1::GetPlanReply Plan() { return Ask(&v1::Admin::Stub::GetPlan, v1::GetPlanRequest()); }
  v1::GetRoutingReply Routing() {
    return Ask(&v1::Admin::Stub::GetRouting, v1::GetRoutingRequest());
  }
  // Asks until it holds; false after kHangsAfter.
  bool WaitFor(const std::function<bool(const v1::GetStatusReply&)>& holds) {
    const auto deadline = std::chrono::steady_clock::now() + kHangsAfter;
    while (!holds(Get())) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));  // between two looks
    }
    return true;
  }
  bool WaitForTrainer(int32_t rank, const std::string& state) {
    return WaitFor([&](const v1::GetStatusReply& status) {
      for (const v1::TrainerStatus& trainer : status.job().trainers()) {
        if (trainer.rank() == rank) return trainer.state() == state;
      }
      return false;
    });
  }
  bool WaitForNoJob() {
    return WaitFor([](const v1::GetStatusReply& status) {
      return !status.version().empty() && !status.has_job();
    });
  }

 private:
  template <typename Request, typename Reply>
  Reply Ask(grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
            const Request& request) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
    Reply reply;
    if (!((*stub_).*method)(&context, request, &reply).ok()) reply.Clear();
    return reply;
  }

  std::unique_ptr<v1::Admin::Stub> stub_;
};

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_SERVER_SYSTEM_DAEMON_STATUS_H_
