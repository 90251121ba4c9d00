#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/wire/layout_parts.h"
#include "server/daemon/errors.h"
#include "server/daemon/layout_bytes.h"
#include "server/daemon/services.h"

namespace dmuond::server {
namespace {

using grpc::ServerContext;

template <typename Reply>
grpc::Status Answer(absl::StatusOr<Reply> result, Reply* reply) {
  if (!result.ok()) return ToGrpc(result.status());
  *reply = *std::move(result);
  return grpc::Status::OK;
}

Daemon::Cancelled CallerGone(ServerContext* context) {
  return [context] { return context->IsCancelled(); };
}

class TrainerService final : public v1::Trainer::Service {
 public:
  explicit TrainerService(Daemon& daemon) : daemon_(daemon) {}

  grpc::Status Hello(ServerContext* /*context*/, const v1::HelloRequest* request,
                     v1::HelloReply* reply) override {
    return Answer(daemon_.Hello(*request), reply);
  }
  grpc::Status OpenSession(ServerContext* context, const v1::OpenSessionRequest* request,
                           v1::OpenSessionReply* reply) override {
    return Answer(daemon_.OpenSession(*request, CallerGone(context)), reply);
  }
  grpc::Status RegisterLayout(
      ServerContext* context,
      grpc::ServerReaderWriter<v1::RegisterLayoutReply, v1::RegisterLayoutRequest>* stream)
      override {
    v1::RegisterLayoutRequest request;
    if (!stream->Read(&request)) {
      return ToGrpc(Error(absl::StatusCode::kInvalidArgument, "LAYOUT_INVALID",
                          "a registration begins with a part that says whose it is"));
    }
    absl::Status kept = daemon_.CheckKey(request.key(), nullptr);
    LayoutBytes::Held held(layout_bytes_, request.key().session());
    if (kept.ok()) kept = held.Add(static_cast<int64_t>(request.ByteSizeLong()));
    v1::RegisterLayoutRequest part;
    while (kept.ok() && stream->Read(&part)) {
      kept = held.Add(static_cast<int64_t>(part.ByteSizeLong()));
      if (kept.ok()) wire::Append(request, part);
    }
    if (!kept.ok()) return ToGrpc(kept);
    // A stream that broke is no shorter layout.
    if (context->IsCancelled()) return ToGrpc(absl::CancelledError("the caller has gone"));
    absl::StatusOr<v1::RegisterLayoutReply> reply =
        daemon_.RegisterLayout(request, CallerGone(context));
    if (!reply.ok()) return ToGrpc(reply.status());
    wire::WriteParts(*stream, *reply);  // false: the caller has gone
    return grpc::Status::OK;
  }
  grpc::Status AttachBuffers(ServerContext* context, const v1::AttachBuffersRequest* request,
                             v1::AttachBuffersReply* reply) override {
    return Answer(daemon_.AttachBuffers(*request, CallerGone(context)), reply);
  }
  grpc::Status PushParameters(ServerContext* context,
                              grpc::ServerReader<v1::PushParametersRequest>* reader,
                              v1::PushParametersReply* reply) override {
    v1::PushParametersRequest header;
    if (!reader->Read(&header)) {
      return ToGrpc(Error(absl::StatusCode::kInvalidArgument, "PUSH_EMPTY",
                          "a push begins with a message that says what is pushed"));
    }
    PushedState state;
    v1::PushParametersRequest message;
    absl::Status kept = header.state() ? daemon_.CheckMayPush(header.key()) : absl::OkStatus();
    while (header.state() && kept.ok() && reader->Read(&message)) {
      kept = daemon_.KeepStateChunk(header.key(), message.chunk(), state);
    }
    if (!kept.ok()) return ToGrpc(kept);
    // A stream that broke is no shorter push.
    if (context->IsCancelled()) return ToGrpc(absl::CancelledError("the caller has gone"));
    return Answer(daemon_.Push(header, state, CallerGone(context)), reply);
  }
  grpc::Status PullParameters(ServerContext* context, const v1::PullParametersRequest* request,
                              grpc::ServerWriter<v1::PullParametersReply>* writer) override {
    return ToGrpc(daemon_.PullParameters(
        *request, CallerGone(context),
        [writer](const v1::PullParametersReply& reply) { return writer->Write(reply); }));
  }
  grpc::Status SubmitStep(ServerContext* context, const v1::SubmitStepRequest* request,
                          v1::SubmitStepReply* reply) override {
    return Answer(daemon_.SubmitStep(*request, CallerGone(context)), reply);
  }
  grpc::Status WaitStep(ServerContext* context, const v1::WaitStepRequest* request,
                        v1::WaitStepReply* reply) override {
    return Answer(daemon_.WaitStep(*request, CallerGone(context)), reply);
  }
  grpc::Status WatchSession(ServerContext* context, const v1::WatchSessionRequest* request,
                            grpc::ServerWriter<v1::SessionEvent>* writer) override {
    return ToGrpc(daemon_.WatchSession(
        *request, CallerGone(context),
        [writer](const v1::SessionEvent& event) { return writer->Write(event); }));
  }
  grpc::Status AckRollback(ServerContext* context, const v1::AckRollbackRequest* request,
                           v1::AckRollbackReply* reply) override {
    return Answer(daemon_.AckRollback(*request, CallerGone(context)), reply);
  }
  grpc::Status SaveSnapshot(ServerContext* context, const v1::SaveSnapshotRequest* request,
                            v1::SaveSnapshotReply* reply) override {
    return Answer(daemon_.SaveSnapshot(*request, CallerGone(context)), reply);
  }
  grpc::Status LoadSnapshot(ServerContext* context, const v1::LoadSnapshotRequest* request,
                            v1::LoadSnapshotReply* reply) override {
    return Answer(daemon_.LoadSnapshot(*request, CallerGone(context)), reply);
  }
  grpc::Status CloseSession(ServerContext* /*context*/, const v1::CloseSessionRequest* request,
                            v1::CloseSessionReply* reply) override {
    return Answer(daemon_.CloseSession(*request), reply);
  }

 private:
  Daemon& daemon_;
  LayoutBytes layout_bytes_;
};

}  // namespace

std::unique_ptr<v1::Trainer::Service> MakeTrainerService(Daemon& daemon) {
  return std::make_unique<TrainerService>(daemon);
}

}  // namespace dmuond::server
