#include "server/daemon/group/direct_service.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "server/common/errors.h"

namespace dmuond::server {
namespace {

constexpr size_t kReplyBytes = size_t{1} << 20;

class DirectService final : public v1::Direct::Service {
 public:
  DirectService(Daemon& daemon, DirectCalls& calls, DirectCallers callers)
      : daemon_(daemon), calls_(calls), callers_(std::move(callers)) {}

  grpc::Status ReadState(grpc::ServerContext* context, const v1::ReadStateRequest* request,
                         grpc::ServerWriter<v1::ReadStateReply>* writer) override {
    if (absl::Status proven = Check("ReadState", *request, *context); !proven.ok()) {
      return ToGrpc(proven);
    }
    absl::StatusOr<StateTensor> tensor =
        daemon_.place(request->place()).tensors.ReadStateForPeer(*request, [context] {
          return context->IsCancelled();
        });
    if (!tensor.ok()) return ToGrpc(tensor.status());
    const size_t per_reply = kReplyBytes / sizeof(float);
    for (size_t first = 0; first < tensor->size(); first += per_reply) {
      const size_t count = std::min(per_reply, tensor->size() - first);
      v1::ReadStateReply reply;
      reply.set_first_element(static_cast<int64_t>(first));
      reply.set_data(std::string(reinterpret_cast<const char*>(tensor->data() + first),
                                 count * sizeof(float)));
      if (!writer->Write(reply)) break;
    }
    return grpc::Status::OK;
  }
  grpc::Status WriteState(grpc::ServerContext* context, const v1::WriteStateRequest* request,
                          v1::WriteStateReply* /*reply*/) override {
    if (absl::Status proven = Check("WriteState", *request, *context); !proven.ok()) {
      return ToGrpc(proven);
    }
    return ToGrpc(daemon_.place(request->place()).tensors.WriteStateForPeer(*request));
  }
  grpc::Status TraceNode(grpc::ServerContext* context, const v1::TraceNodeRequest* request,
                         grpc::ServerWriter<v1::TraceNodeReply>* writer) override {
    if (absl::Status proven = Check("TraceNode", *request, *context); !proven.ok()) {
      return ToGrpc(proven);
    }
    absl::StatusOr<std::vector<v1::LaneTrace>> lanes =
        daemon_.place(request->place()).traces.TraceForPeer(*request, [context] {
          return context->IsCancelled();
        });
    if (!lanes.ok()) return ToGrpc(lanes.status());
    for (v1::LaneTrace& lane : *lanes) {
      v1::TraceNodeReply reply;
      *reply.mutable_lane() = std::move(lane);
      if (!writer->Write(reply)) break;
    }
    return grpc::Status::OK;
  }
  grpc::Status ReadClock(grpc::ServerContext* context, const v1::ReadClockRequest* request,
                         v1::ReadClockReply* reply) override {
    if (absl::Status proven = Check("ReadClock", *request, *context); !proven.ok()) {
      return ToGrpc(proven);
    }
    reply->set_monotonic_us(MonotonicUs());
    return grpc::Status::OK;
  }

 private:
  template <typename Request>
  absl::Status Check(const char* method, const Request& request, grpc::ServerContext& context) {
    const std::optional<int32_t> connected = callers_.node_of(context);
    if (!connected.has_value()) return absl::CancelledError("the caller has gone");
    absl::Status proven = calls_.Check(method, request, *connected, context);
    if (!proven.ok()) callers_.refused(proven);
    return proven;
  }

  Daemon& daemon_;
  DirectCalls& calls_;
  const DirectCallers callers_;
};

}  // namespace

std::unique_ptr<v1::Direct::Service> MakeDirectService(Daemon& daemon, DirectCalls& calls,
                                                       DirectCallers callers) {
  return std::make_unique<DirectService>(daemon, calls, std::move(callers));
}

}  // namespace dmuond::server
