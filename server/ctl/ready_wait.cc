#include "server/ctl/ready_wait.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>

#include "grpc/health/v1/health.grpc.pb.h"
#include "server/common/errors.h"
#include "server/ctl/connection.h"

namespace dmuond::server::ctl {

namespace health = grpc::health::v1;

ReadyWait::ReadyWait(std::string socket, absl::Duration timeout)
    : socket_(std::move(socket)), done_(::eventfd(0, EFD_CLOEXEC)) {
  context_.set_wait_for_ready(true);  // the socket is not there yet
  context_.set_deadline(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(timeout));
  thread_ = std::thread([this] {
    result_ = Watch();
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(done_.get(), &one, sizeof(one));
  });
}

ReadyWait::~ReadyWait() {
  context_.TryCancel();
  if (thread_.joinable()) thread_.join();
}

absl::Status ReadyWait::Result() {
  if (thread_.joinable()) thread_.join();
  return result_;
}

absl::Status ReadyWait::Watch() {
  const absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = Connect(socket_);
  if (!channel.ok()) return channel.status();
  const auto stub = health::Health::NewStub(*channel);
  health::HealthCheckRequest request;
  request.set_service("ready");
  const auto changes = stub->Watch(&context_, request);
  health::HealthCheckResponse response;
  bool ready = false;
  while (!ready && changes->Read(&response)) {
    ready = response.status() == health::HealthCheckResponse::SERVING;
  }
  context_.TryCancel();
  const grpc::Status ended = changes->Finish();
  return ready ? absl::OkStatus() : FromGrpc(ended);
}

}  // namespace dmuond::server::ctl
