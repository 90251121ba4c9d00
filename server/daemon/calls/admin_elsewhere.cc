#include "absl/strings/str_cat.h"
#include "server/daemon/calls/services.h"

namespace dmuond::server {
namespace {

using grpc::ServerContext;
using grpc::Status;

class AdminElsewhere final : public v1::Admin::Service {
 public:
  explicit AdminElsewhere(const std::string& path)
      : elsewhere_(grpc::StatusCode::UNIMPLEMENTED,
                   absl::StrCat("administration has a socket of its own, ", path,
                                ": update dmuonctl to the daemon's release")) {}

  Status GetStatus(ServerContext* /*context*/, const v1::GetStatusRequest* /*request*/,
                   v1::GetStatusReply* /*reply*/) override {
    return elsewhere_;
  }
  Status ListJobs(ServerContext* /*context*/, const v1::ListJobsRequest* /*request*/,
                  v1::ListJobsReply* /*reply*/) override {
    return elsewhere_;
  }
  Status GetPlan(ServerContext* /*context*/, const v1::GetPlanRequest* /*request*/,
                 v1::GetPlanReply* /*reply*/) override {
    return elsewhere_;
  }
  Status GetRouting(ServerContext* /*context*/, const v1::GetRoutingRequest* /*request*/,
                    v1::GetRoutingReply* /*reply*/) override {
    return elsewhere_;
  }
  Status Drain(ServerContext* /*context*/, const v1::DrainRequest* /*request*/,
               v1::DrainReply* /*reply*/) override {
    return elsewhere_;
  }
  Status LoadJob(ServerContext* /*context*/, const v1::LoadJobRequest* /*request*/,
                 v1::LoadJobReply* /*reply*/) override {
    return elsewhere_;
  }
  Status SaveJob(ServerContext* /*context*/, const v1::SaveJobRequest* /*request*/,
                 v1::SaveJobReply* /*reply*/) override {
    return elsewhere_;
  }
  Status SetLogLevel(ServerContext* /*context*/, const v1::SetLogLevelRequest* /*request*/,
                     v1::SetLogLevelReply* /*reply*/) override {
    return elsewhere_;
  }

 private:
  const Status elsewhere_;
};

}  // namespace

std::unique_ptr<v1::Admin::Service> MakeAdminElsewhere(const std::string& path) {
  return std::make_unique<AdminElsewhere>(path);
}

}  // namespace dmuond::server
