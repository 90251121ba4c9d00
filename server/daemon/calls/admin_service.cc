#include <utility>

#include "absl/status/statusor.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/daemon/calls/services.h"
#include "server/daemon/calls/text_limits.h"

namespace dmuond::server {
namespace {

using grpc::ServerContext;

class AdminService final : public v1::Admin::Service {
 public:
  AdminService(Daemon& daemon, std::function<void()> drain)
      : daemon_(daemon), drain_(std::move(drain)) {}

  grpc::Status GetStatus(ServerContext* /*context*/, const v1::GetStatusRequest* /*request*/,
                         v1::GetStatusReply* reply) override {
    *reply = daemon_.admin().Status();
    return grpc::Status::OK;
  }
  grpc::Status ListJobs(ServerContext* /*context*/, const v1::ListJobsRequest* /*request*/,
                        v1::ListJobsReply* reply) override {
    const v1::GetStatusReply status = daemon_.admin().Status();
    if (status.has_job()) *reply->add_jobs() = status.job();
    reply->set_picture_age_ms(status.picture_age_ms());
    return grpc::Status::OK;
  }
  grpc::Status GetPlan(ServerContext* /*context*/, const v1::GetPlanRequest* /*request*/,
                       v1::GetPlanReply* reply) override {
    absl::StatusOr<v1::GetPlanReply> plan = daemon_.admin().Plan();
    if (!plan.ok()) return ToGrpc(plan.status());
    *reply = *std::move(plan);
    return grpc::Status::OK;
  }
  grpc::Status GetRouting(ServerContext* /*context*/, const v1::GetRoutingRequest* /*request*/,
                          v1::GetRoutingReply* reply) override {
    absl::StatusOr<v1::GetRoutingReply> routing = daemon_.admin().Routing();
    if (!routing.ok()) return ToGrpc(routing.status());
    *reply = *std::move(routing);
    return grpc::Status::OK;
  }
  grpc::Status Drain(ServerContext* context, const v1::DrainRequest* /*request*/,
                     v1::DrainReply* reply) override {
    drain_();
    absl::StatusOr<v1::DrainReply> prepared =
        daemon_.admin().WaitUntilPrepared([context] { return context->IsCancelled(); });
    if (!prepared.ok()) return ToGrpc(prepared.status());
    *reply = *std::move(prepared);
    return grpc::Status::OK;
  }
  grpc::Status LoadJob(ServerContext* context, const v1::LoadJobRequest* request,
                       v1::LoadJobReply* reply) override {
    absl::StatusOr<v1::LoadJobReply> loaded =
        daemon_.snapshots().LoadJob(*request, [context] { return context->IsCancelled(); });
    if (!loaded.ok()) return ToGrpc(loaded.status());
    *reply = *std::move(loaded);
    return grpc::Status::OK;
  }
  grpc::Status SaveJob(ServerContext* context, const v1::SaveJobRequest* /*request*/,
                       v1::SaveJobReply* reply) override {
    absl::StatusOr<v1::SaveJobReply> saved =
        daemon_.snapshots().SaveJob([context] { return context->IsCancelled(); });
    if (!saved.ok()) return ToGrpc(saved.status());
    *reply = *std::move(saved);
    return grpc::Status::OK;
  }
  grpc::Status EndJob(ServerContext* context, const v1::EndJobRequest* request,
                      v1::EndJobReply* reply) override {
    if (absl::Status checked = CheckText(*request); !checked.ok()) return ToGrpc(checked);
    absl::StatusOr<v1::EndJobReply> ended =
        daemon_.admin().EndJobNamed(*request, [context] { return context->IsCancelled(); });
    if (!ended.ok()) return ToGrpc(ended.status());
    *reply = *std::move(ended);
    return grpc::Status::OK;
  }
  grpc::Status SetLogLevel(ServerContext* /*context*/, const v1::SetLogLevelRequest* request,
                           v1::SetLogLevelReply* reply) override {
    if (absl::Status checked = CheckText(*request); !checked.ok()) return ToGrpc(checked);
    absl::StatusOr<log::Level> level = log::ParseLevel(request->level());
    if (!level.ok()) return ToGrpc(level.status());
    reply->set_previous(log::Name(daemon_.admin().SetLogLevel(*level)));
    return grpc::Status::OK;
  }

 private:
  Daemon& daemon_;
  const std::function<void()> drain_;
};

}  // namespace

std::unique_ptr<v1::Admin::Service> MakeAdminService(Daemon& daemon, std::function<void()> drain) {
  return std::make_unique<AdminService>(daemon, std::move(drain));
}

}  // namespace dmuond::server
