// Makes calls of the Trainer service. They block, return errors with their reasons, and are
// repeated where only the connection was cut. Threads: one at a time.
#ifndef DMUOND_CLIENT_CPP_SRC_CHANNEL_H_
#define DMUOND_CLIENT_CPP_SRC_CHANNEL_H_

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "dmuond/v1/trainer.grpc.pb.h"

namespace dmuond::client {

class Channel {
 public:
  using GoneWithin = std::function<bool(std::chrono::milliseconds)>;
  // `gone` tells apart a daemon that has ended from a connection that was cut. One that has not
  // ended and does not even answer pings for `silent_for` (it is stopped) is DAEMON_UNREACHABLE.
  // `how_it_ended`: AttachSocket's.
  Channel(const std::string& path, std::chrono::milliseconds silent_for, GoneWithin gone,
          std::function<std::string()> how_it_ended);

  // How long a call may take, and whether it may be repeated. Only calls whose answer the daemon
  // keeps may.
  struct Policy {
    std::chrono::milliseconds timeout{24LL * 3600 * 1000};
    bool repeat = true;
  };
  template <typename Request, typename Reply>
  absl::Status Call(const char* name,
                    grpc::Status (v1::Trainer::Stub::*method)(grpc::ClientContext*, const Request&,
                                                              Reply*),
                    const Request& request, Reply& reply, Policy policy) {
    return Repeat(name, policy, [&](grpc::ClientContext& context) {
      return (stub_.get()->*method)(&context, request, &reply);
    });
  }
  // In parts both ways, repeated like calls.
  absl::Status RegisterLayout(const v1::RegisterLayoutRequest& request,
                              v1::RegisterLayoutReply& reply);
  // One push, repeated like calls: it names its attempt.
  absl::Status Push(const std::vector<v1::PushParametersRequest>& messages,
                    v1::PushParametersReply& reply);
  // Hands each message to `take`. After a cut connection they come again from the first one.
  absl::Status Pull(const v1::PullParametersRequest& request,
                    const std::function<absl::Status(const v1::PullParametersReply&)>& take);

 private:
  absl::Status Repeat(const char* name, Policy policy,
                      const std::function<grpc::Status(grpc::ClientContext&)>& attempt);

  const GoneWithin gone_;
  const std::function<std::string()> how_it_ended_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Trainer::Stub> stub_;
};

}  // namespace dmuond::client

#endif  // DMUOND_CLIENT_CPP_SRC_CHANNEL_H_
