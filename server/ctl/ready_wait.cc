#include "server/ctl/ready_wait.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>

#include "grpc/health/v1/health.grpc.pb.h"
#include "server/ctl/connection.h"

namespace dmuond::server::ctl {

namespace health = grpc::health::v1;

ReadyWait::ReadyWait(std::string socket, absl::Duration timeout)
    : socket_(std::move(socket)), done_(::eventfd(0, EFD_CLOEXEC)) {
  context_.set_wait_for_ready(true);  // the socket is not there yet
  context_.set_deadline(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(timeout));
  thread_ = std::thread([this] { Watch(); });
}

ReadyWait::~ReadyWait() {
  context_.TryCancel();
  thread_.join();
}

void ReadyWait::Watch() {
  const auto stub = health::Health::NewStub(Connect(socket_));
  health::HealthCheckRequest request;
  request.set_service("ready");
  const auto changes = stub->Watch(&context_, request);
  health::HealthCheckResponse response;
  while (!ready_.load() && changes->Read(&response)) {
    ready_.store(response.status() == health::HealthCheckResponse::SERVING);
  }
  context_.TryCancel();
  [[maybe_unused]] const grpc::Status ended = changes->Finish();
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(done_.get(), &one, sizeof(one));
}

}  // namespace dmuond::server::ctl
