#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/mutex.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/common/seldom.h"
#include "server/daemon/calls/services.h"
#include "server/daemon/calls/text_limits.h"

namespace dmuond::server {
namespace {

using grpc::ServerContext;

class AdminService final : public v1::Admin::Service {
 public:
  AdminService(Daemon& daemon, GrpcSocket& socket, std::vector<uid_t> admins,
               std::function<void()> drain)
      : daemon_(daemon), socket_(socket), admins_(std::move(admins)), drain_(std::move(drain)) {}

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
  grpc::Status TraceSteps(ServerContext* context, const v1::TraceStepsRequest* request,
                          v1::TraceStepsReply* reply) override {
    absl::StatusOr<v1::TraceStepsReply> traced =
        daemon_.admin().TraceSteps(*request, [context] { return context->IsCancelled(); });
    if (!traced.ok()) return ToGrpc(traced.status());
    *reply = *std::move(traced);
    return grpc::Status::OK;
  }
  grpc::Status Drain(ServerContext* context, const v1::DrainRequest* /*request*/,
                     v1::DrainReply* reply) override {
    if (absl::Status may = BeginChange(*context, "Drain"); !may.ok()) return ToGrpc(may);
    drain_();
    absl::StatusOr<v1::DrainReply> prepared =
        daemon_.admin().WaitUntilPrepared([context] { return context->IsCancelled(); });
    if (!prepared.ok()) return ToGrpc(prepared.status());
    *reply = *std::move(prepared);
    return grpc::Status::OK;
  }
  grpc::Status LoadJob(ServerContext* context, const v1::LoadJobRequest* request,
                       v1::LoadJobReply* reply) override {
    absl::Status may = BeginChange(*context, "LoadJob", {{"step", request->step()}});
    if (!may.ok()) return ToGrpc(may);
    absl::StatusOr<v1::LoadJobReply> loaded =
        daemon_.snapshots().LoadJob(*request, [context] { return context->IsCancelled(); });
    if (!loaded.ok()) return ToGrpc(loaded.status());
    *reply = *std::move(loaded);
    return grpc::Status::OK;
  }
  grpc::Status SaveJob(ServerContext* context, const v1::SaveJobRequest* /*request*/,
                       v1::SaveJobReply* reply) override {
    if (absl::Status may = BeginChange(*context, "SaveJob"); !may.ok()) return ToGrpc(may);
    absl::StatusOr<v1::SaveJobReply> saved =
        daemon_.snapshots().SaveJob([context] { return context->IsCancelled(); });
    if (!saved.ok()) return ToGrpc(saved.status());
    *reply = *std::move(saved);
    return grpc::Status::OK;
  }
  grpc::Status EndJob(ServerContext* context, const v1::EndJobRequest* request,
                      v1::EndJobReply* reply) override {
    if (absl::Status checked = CheckText(*request); !checked.ok()) return ToGrpc(checked);
    absl::Status may =
        BeginChange(*context, "EndJob", {{"job", request->name()}, {"save", request->save()}});
    if (!may.ok()) return ToGrpc(may);
    absl::StatusOr<v1::EndJobReply> ended =
        daemon_.admin().EndJobNamed(*request, [context] { return context->IsCancelled(); });
    if (!ended.ok()) return ToGrpc(ended.status());
    *reply = *std::move(ended);
    return grpc::Status::OK;
  }
  grpc::Status SetLogLevel(ServerContext* context, const v1::SetLogLevelRequest* request,
                           v1::SetLogLevelReply* reply) override {
    if (absl::Status checked = CheckText(*request); !checked.ok()) return ToGrpc(checked);
    absl::StatusOr<log::Level> level = log::ParseLevel(request->level());
    if (!level.ok()) return ToGrpc(level.status());
    absl::Status may = BeginChange(*context, "SetLogLevel", {{"level", request->level()}});
    if (!may.ok()) return ToGrpc(may);
    reply->set_previous(log::Name(daemon_.admin().SetLogLevel(*level)));
    return grpc::Status::OK;
  }

 private:
  // Whether the caller may change something. Logs who it is, with `details`.
  absl::Status BeginChange(const ServerContext& context, const char* call,
                           std::vector<log::Field> details = {}) {
    const std::optional<Caller> caller = socket_.CallerOf(context);
    if (!caller.has_value()) return absl::CancelledError("the caller has gone");
    details.insert(details.begin(), {{"call", call}, {"uid", caller->uid}, {"pid", caller->pid}});
    if (std::find(admins_.begin(), admins_.end(), caller->uid) != admins_.end()) {
      log::Info("an admin call changes something", details);
      return absl::OkStatus();
    }
    std::optional<int64_t> passed_over;
    {
      MutexLock lock(mutex_);
      passed_over = refusals_.Now(std::chrono::steady_clock::now());
    }
    if (passed_over.has_value()) {
      details.emplace_back("others_since_the_last_line", *passed_over);
      log::Warn("an admin call is refused (--admin_uids)", details);
    }
    return Error(
        absl::StatusCode::kPermissionDenied, "ADMIN_ONLY",
        Say("uid ", Named("uid", caller->uid), " may look, and not call ", Named("call", call),
            ": that is for root, for the daemon's own user, and for "
            "those in its --admin_uids"));
  }

  Daemon& daemon_;
  GrpcSocket& socket_;
  const std::vector<uid_t> admins_;
  const std::function<void()> drain_;
  Mutex mutex_;
  Seldom refusals_ DMUOND_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<v1::Admin::Service> MakeAdminService(Daemon& daemon, GrpcSocket& socket,
                                                     std::vector<uid_t> admins,
                                                     std::function<void()> drain) {
  return std::make_unique<AdminService>(daemon, socket, std::move(admins), std::move(drain));
}

}  // namespace dmuond::server
