#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "scheduler/shown_pid.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/common/seldom.h"
#include "server/daemon/calls/services.h"
#include "server/daemon/calls/text_limits.h"

namespace dmuond::server {
namespace {

using grpc::ServerContext;

constexpr int64_t kWaitMsMax = 60'000;

class AdminService final : public v1::Admin::Service {
 public:
  AdminService(Daemon& daemon, Readiness& readiness, GrpcSocket& socket, std::vector<uid_t> admins,
               std::function<void()> drain)
      : daemon_(daemon),
        readiness_(readiness),
        socket_(socket),
        admins_(std::move(admins)),
        drain_(std::move(drain)) {}

  grpc::Status GetStatus(ServerContext* /*context*/, const v1::GetStatusRequest* request,
                         v1::GetStatusReply* reply) override {
    if (absl::Status checked = CheckText(*request); !checked.ok()) return ToGrpc(checked);
    return Answer(daemon_.node().Status(*request), reply);
  }
  grpc::Status ListJobs(ServerContext* /*context*/, const v1::ListJobsRequest* /*request*/,
                        v1::ListJobsReply* reply) override {
    *reply = daemon_.node().Jobs();
    return grpc::Status::OK;
  }
  grpc::Status GetPlan(ServerContext* /*context*/, const v1::GetPlanRequest* request,
                       v1::GetPlanReply* reply) override {
    return AnswerOf(*request, reply, [](Place& place) { return place.admin.Plan(); });
  }
  grpc::Status GetRouting(ServerContext* /*context*/, const v1::GetRoutingRequest* request,
                          v1::GetRoutingReply* reply) override {
    return AnswerOf(*request, reply, [](Place& place) { return place.admin.Routing(); });
  }
  grpc::Status TraceSteps(ServerContext* context, const v1::TraceStepsRequest* request,
                          v1::TraceStepsReply* reply) override {
    return AnswerOf(*request, reply, [&](Place& place) {
      return place.traces.TraceSteps(*request, [context] { return context->IsCancelled(); });
    });
  }
  grpc::Status SampleUpdates(ServerContext* context, const v1::SampleUpdatesRequest* request,
                             v1::SampleUpdatesReply* reply) override {
    return AnswerOf(*request, reply, [&](Place& place) {
      return place.samples.SampleUpdates(*request, [context] { return context->IsCancelled(); });
    });
  }
  grpc::Status CheckJob(ServerContext* context, const v1::CheckJobRequest* request,
                        v1::CheckJobReply* reply) override {
    return AnswerOf(*request, reply, [&](Place& place) {
      return place.checks.CheckJob(*request, [context] { return context->IsCancelled(); });
    });
  }
  grpc::Status Drain(ServerContext* context, const v1::DrainRequest* request,
                     v1::DrainReply* reply) override {
    absl::Status may = BeginChange(*context, "Drain", {{"force", request->force()}});
    if (may.ok() && !request->force()) may = daemon_.node().CheckSnapshots();
    if (!may.ok()) return ToGrpc(may);
    drain_();
    return Answer(daemon_.node().WaitUntilPrepared([context] { return context->IsCancelled(); }),
                  reply);
  }
  grpc::Status LoadJob(ServerContext* context, const v1::LoadJobRequest* request,
                       v1::LoadJobReply* reply) override {
    absl::Status may =
        BeginChange(*context, "LoadJob", {{"job", request->job()}, {"step", request->step()}});
    if (!may.ok()) return ToGrpc(may);
    return AnswerOf(*request, reply, [&](Place& place) {
      return place.snapshots.LoadJob(*request, [context] { return context->IsCancelled(); });
    });
  }
  grpc::Status SaveJob(ServerContext* context, const v1::SaveJobRequest* request,
                       v1::SaveJobReply* reply) override {
    absl::Status may = BeginChange(*context, "SaveJob", {{"job", request->job()}});
    if (!may.ok()) return ToGrpc(may);
    return AnswerOf(*request, reply, [&](Place& place) {
      return place.snapshots.SaveJob([context] { return context->IsCancelled(); });
    });
  }
  grpc::Status EndJob(ServerContext* context, const v1::EndJobRequest* request,
                      v1::EndJobReply* reply) override {
    if (absl::Status checked = CheckText(*request); !checked.ok()) return ToGrpc(checked);
    absl::Status may =
        BeginChange(*context, "EndJob", {{"job", request->name()}, {"save", request->save()}});
    if (!may.ok()) return ToGrpc(may);
    const absl::StatusOr<Place*> place = daemon_.node().PlaceOf(request->name());
    if (!place.ok()) return ToGrpc(place.status());
    return Answer(
        (*place)->admin.EndJobNamed(*request, [context] { return context->IsCancelled(); }), reply);
  }
  grpc::Status AcceptLanes(ServerContext* context, const v1::AcceptLanesRequest* request,
                           v1::AcceptLanesReply* reply) override {
    if (absl::Status checked = CheckText(*request); !checked.ok()) return ToGrpc(checked);
    absl::Status may = BeginChange(*context, "AcceptLanes", {{"job", request->name()}});
    if (!may.ok()) return ToGrpc(may);
    const absl::StatusOr<Place*> place = daemon_.node().PlaceOf(request->name());
    if (!place.ok()) return ToGrpc(place.status());
    return Answer((*place)->admin.AcceptLanes(request->name()), reply);
  }
  grpc::Status GetReadiness(ServerContext* context, const v1::GetReadinessRequest* request,
                            v1::GetReadinessReply* reply) override {
    if (request->wait_ms() < 0 || request->wait_ms() > kWaitMsMax ||
        !v1::GetReadinessRequest::State_IsValid(request->awaited())) {
      return ToGrpc(
          Error(absl::StatusCode::kInvalidArgument, "READINESS_INVALID",
                Say("a wait of ", Named("wait_ms", request->wait_ms()), " ms for the state ",
                    Named("awaited", request->awaited()), ": there are 0 to ", kWaitMsMax,
                    " ms, and the states 0 to ", v1::GetReadinessRequest::State_MAX)));
    }
    *reply = readiness_.Await(request->awaited(), std::chrono::milliseconds(request->wait_ms()),
                              [context] { return context->IsCancelled(); });
    return grpc::Status::OK;
  }
  grpc::Status SetLogLevel(ServerContext* context, const v1::SetLogLevelRequest* request,
                           v1::SetLogLevelReply* reply) override {
    if (absl::Status checked = CheckText(*request); !checked.ok()) return ToGrpc(checked);
    absl::StatusOr<log::Level> level = log::ParseLevel(request->level());
    if (!level.ok()) return ToGrpc(level.status());
    absl::Status may = BeginChange(*context, "SetLogLevel", {{"level", request->level()}});
    if (!may.ok()) return ToGrpc(may);
    reply->set_previous(log::Name(daemon_.node().SetLogLevel(*level)));
    return grpc::Status::OK;
  }

 private:
  // What `call` answers for the job that the request names.
  template <typename Request, typename Reply, typename Call>
  grpc::Status AnswerOf(const Request& request, Reply* reply, const Call& call) {
    if (absl::Status checked = CheckText(request); !checked.ok()) return ToGrpc(checked);
    const absl::StatusOr<Place*> place = daemon_.node().PlaceOf(request.job());
    return place.ok() ? Answer(call(**place), reply) : ToGrpc(place.status());
  }
  // Whether the caller may change something. Logs who it is, with `details`.
  absl::Status BeginChange(const ServerContext& context, const char* call,
                           std::vector<log::Field> details = {}) {
    const std::optional<Caller> caller = socket_.CallerOf(context);
    if (!caller.has_value()) return absl::CancelledError("the caller has gone");
    details.insert(details.begin(), {{"call", call},
                                     {"uid", caller->uid},
                                     scheduler::PidField<log::Field>(caller->process.pid)});
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
  Readiness& readiness_;
  GrpcSocket& socket_;
  const std::vector<uid_t> admins_;
  const std::function<void()> drain_;
  Mutex mutex_;
  Seldom refusals_ DMUOND_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<v1::Admin::Service> MakeAdminService(Daemon& daemon, Readiness& readiness,
                                                     GrpcSocket& socket, std::vector<uid_t> admins,
                                                     std::function<void()> drain) {
  return std::make_unique<AdminService>(daemon, readiness, socket, std::move(admins),
                                        std::move(drain));
}

}  // namespace dmuond::server
