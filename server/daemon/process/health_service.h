// The standard health service. gRPC brings one of its own, but that one runs on threads that poll
// beside the server's: every event of every connection may then wake one of them first, which
// costs a step two more changes of thread.
//
//   HealthState state;
//   auto service = MakeHealthService(state);  // one for each server
//   state.Set("ready", true);
//   state.Stop();  // before the servers shut down
//
// Threads: any.
#ifndef DMUOND_SERVER_DAEMON_PROCESS_HEALTH_SERVICE_H_
#define DMUOND_SERVER_DAEMON_PROCESS_HEALTH_SERVICE_H_

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "grpcpp/impl/codegen/service_type.h"
#include "kernels/mutex.h"

namespace dmuond::server {

// At most so many watches may be open on each server, because each holds a thread; further ones get
// RESOURCE_EXHAUSTED.
inline constexpr int kWatchesMax = 64;

class HealthState {
 public:
  void Set(const std::string& service, bool serving) DMUOND_EXCLUDES(mutex_);
  // The service is serving for this time, unless this is called again.
  void SetFor(const std::string& service, std::chrono::milliseconds lasts) DMUOND_EXCLUDES(mutex_);
  // Ends every watch, now and later.
  void Stop() DMUOND_EXCLUDES(mutex_);

  // Whether a service is serving; nullopt: there is no such service. "" is the server itself, and
  // always serving.
  [[nodiscard]] std::optional<bool> Serving(const std::string& service) DMUOND_EXCLUDES(mutex_);
  // Waits until Serving() differs from `known`, or `wait` has passed. False: Stop() was called. If
  // the time of SetFor() runs out, this is seen at the end of `wait`.
  bool WaitForChange(const std::string& service, std::optional<bool> known,
                     std::chrono::milliseconds wait) DMUOND_EXCLUDES(mutex_);

 private:
  [[nodiscard]] std::optional<bool> Find(const std::string& service) const DMUOND_REQUIRES(mutex_);

  Mutex mutex_;
  CondVar changed_;
  bool stopped_ DMUOND_GUARDED_BY(mutex_) = false;
  using TimePoint = std::chrono::steady_clock::time_point;
  std::map<std::string, TimePoint> serves_until_ DMUOND_GUARDED_BY(mutex_);
};

// `state` must outlive the service.
[[nodiscard]] std::unique_ptr<grpc::Service> MakeHealthService(HealthState& state);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_PROCESS_HEALTH_SERVICE_H_
