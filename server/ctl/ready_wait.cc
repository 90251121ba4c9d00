#include "server/ctl/ready_wait.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "server/common/errors.h"
#include "server/ctl/connection.h"

namespace dmuond::server::ctl {

namespace {

// A daemon answers sooner where it has nothing new to say.
constexpr absl::Duration kWaitMax = absl::Seconds(30);

}  // namespace

ReadyWait::ReadyWait(std::string socket, absl::Duration timeout)
    : socket_(std::move(socket)), done_(::eventfd(0, EFD_CLOEXEC)), until_(absl::Now() + timeout) {
  thread_ = std::thread([this] {
    result_ = Wait();
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(done_.get(), &one, sizeof(one));
  });
}

ReadyWait::~ReadyWait() {
  stop_.request_stop();
  if (thread_.joinable()) thread_.join();
}

absl::Status ReadyWait::Result() {
  if (thread_.joinable()) thread_.join();
  return result_;
}

absl::Status ReadyWait::Wait() {
  ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel, Connect(socket_));
  const auto stub = v1::Admin::NewStub(channel);
  for (;;) {
    grpc::ClientContext context;
    context.set_wait_for_ready(true);  // the socket is not there yet
    context.set_deadline(absl::ToChronoTime(until_));
    const std::stop_callback cancels(stop_.get_token(), [&context] { context.TryCancel(); });
    v1::GetReadinessRequest request;
    request.set_awaited(v1::GetReadinessRequest::STATE_READY);
    request.set_wait_ms(absl::ToInt64Milliseconds(kWaitMax));
    v1::GetReadinessReply reply;
    const grpc::Status status = stub->GetReadiness(&context, request, &reply);
    if (!status.ok()) return FromGrpc(status);
    if (reply.ready()) return absl::OkStatus();
  }
}

}  // namespace dmuond::server::ctl
