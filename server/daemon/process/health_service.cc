#include "server/daemon/process/health_service.h"

#include <atomic>

#include "grpc/health/v1/health.grpc.pb.h"

namespace dmuond::server {
namespace {

namespace health = grpc::health::v1;

// A caller that hangs up is noticed within this time.
constexpr std::chrono::milliseconds kLookAtCaller{250};

health::HealthCheckResponse::ServingStatus StatusOf(std::optional<bool> serving) {
  if (!serving.has_value()) return health::HealthCheckResponse::SERVICE_UNKNOWN;
  return *serving ? health::HealthCheckResponse::SERVING : health::HealthCheckResponse::NOT_SERVING;
}

class HealthService final : public health::Health::Service {
 public:
  explicit HealthService(HealthState& state) : state_(state) {}

  grpc::Status Check(grpc::ServerContext* /*context*/, const health::HealthCheckRequest* request,
                     health::HealthCheckResponse* response) override {
    const std::optional<bool> serving = state_.Serving(request->service());
    if (!serving.has_value()) {
      return {grpc::StatusCode::NOT_FOUND, "health: no service '" + request->service() + "'"};
    }
    response->set_status(StatusOf(serving));
    return grpc::Status::OK;
  }

  grpc::Status Watch(grpc::ServerContext* context, const health::HealthCheckRequest* request,
                     grpc::ServerWriter<health::HealthCheckResponse>* writer) override {
    const Place place(watches_);
    if (place.number() > kWatchesMax) {
      return {grpc::StatusCode::RESOURCE_EXHAUSTED,
              "health: " + std::to_string(kWatchesMax) + " watches are open, and no more may be"};
    }
    std::optional<bool> told = state_.Serving(request->service());
    health::HealthCheckResponse response;
    response.set_status(StatusOf(told));
    if (!writer->Write(response)) return grpc::Status::OK;
    while (state_.WaitForChange(request->service(), told, kLookAtCaller)) {
      if (context->IsCancelled()) return grpc::Status::CANCELLED;
      const std::optional<bool> serving = state_.Serving(request->service());
      if (serving == told) continue;
      told = serving;
      response.set_status(StatusOf(told));
      if (!writer->Write(response)) return grpc::Status::OK;
    }
    return {grpc::StatusCode::CANCELLED, "the server is leaving"};
  }

 private:
  // Among the watches that are open.
  class Place {
   public:
    explicit Place(std::atomic<int>& open) : open_(open), number_(++open) {}
    ~Place() { --open_; }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;
    [[nodiscard]] int number() const { return number_; }

   private:
    std::atomic<int>& open_;
    const int number_;
  };

  HealthState& state_;
  std::atomic<int> watches_{0};
};

}  // namespace

void HealthState::Set(const std::string& service, bool serving) {
  MutexLock lock(mutex_);
  serves_until_[service] = serving ? TimePoint::max() : TimePoint::min();
  changed_.NotifyAll();
}

void HealthState::SetFor(const std::string& service, std::chrono::milliseconds lasts) {
  MutexLock lock(mutex_);
  serves_until_[service] = std::chrono::steady_clock::now() + lasts;
  changed_.NotifyAll();
}

void HealthState::Stop() {
  MutexLock lock(mutex_);
  stopped_ = true;
  changed_.NotifyAll();
}

std::optional<bool> HealthState::Find(const std::string& service) const {
  if (service.empty()) return true;
  const auto found = serves_until_.find(service);
  if (found == serves_until_.end()) return std::nullopt;
  return std::chrono::steady_clock::now() < found->second;
}

std::optional<bool> HealthState::Serving(const std::string& service) {
  MutexLock lock(mutex_);
  return Find(service);
}

bool HealthState::WaitForChange(const std::string& service, std::optional<bool> known,
                                std::chrono::milliseconds wait) {
  const auto deadline = std::chrono::steady_clock::now() + wait;
  MutexLock lock(mutex_);
  while (!stopped_ && Find(service) == known) {
    if (!changed_.WaitUntil(mutex_, deadline)) break;
  }
  return !stopped_;
}

std::unique_ptr<grpc::Service> MakeHealthService(HealthState& state) {
  return std::make_unique<HealthService>(state);
}

}  // namespace dmuond::server
