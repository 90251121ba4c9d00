#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/wire/layout_parts.h"
#include "server/daemon/errors.h"
#include "server/daemon/layout_bytes.h"
#include "server/daemon/services.h"
#include "server/daemon/text_limits.h"

namespace dmuond::server {
namespace {

using grpc::ServerContext;

template <typename Reply>
grpc::Status Answer(absl::StatusOr<Reply> result, Reply* reply) {
  if (!result.ok()) return ToGrpc(result.status());
  *reply = *std::move(result);
  return grpc::Status::OK;
}

// What `call` answers to a request whose strings are not too long.
template <typename Request, typename Reply, typename Call>
grpc::Status Checked(const Request& request, Reply* reply, const Call& call) {
  if (absl::Status checked = CheckText(request); !checked.ok()) return ToGrpc(checked);
  return Answer(call(), reply);
}

Daemon::Cancelled CallerGone(ServerContext* context) {
  return [context] { return context->IsCancelled(); };
}

class TrainerService final : public v1::Trainer::Service {
 public:
  explicit TrainerService(Daemon& daemon) : daemon_(daemon) {}

  grpc::Status Hello(ServerContext* /*context*/, const v1::HelloRequest* request,
                     v1::HelloReply* reply) override {
    return Checked(*request, reply, [&] { return daemon_.Hello(*request); });
  }
  grpc::Status OpenSession(ServerContext* context, const v1::OpenSessionRequest* request,
                           v1::OpenSessionReply* reply) override {
    return Checked(*request, reply,
                   [&] { return daemon_.OpenSession(*request, CallerGone(context)); });
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
    if (kept.ok()) kept = CheckText(request);
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
    return Checked(*request, reply,
                   [&] { return daemon_.AttachBuffers(*request, CallerGone(context)); });
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
    absl::Status kept = CheckText(header);
    if (kept.ok() && header.state()) kept = daemon_.CheckMayPush(header.key());
    while (header.state() && kept.ok() && reader->Read(&message)) {
      kept = CheckText(message);
      if (kept.ok()) kept = daemon_.KeepStateChunk(header.key(), message.chunk(), state);
    }
    if (!kept.ok()) return ToGrpc(kept);
    // A stream that broke is no shorter push.
    if (context->IsCancelled()) return ToGrpc(absl::CancelledError("the caller has gone"));
    return Answer(daemon_.Push(header, state, CallerGone(context)), reply);
  }
  grpc::Status PullParameters(ServerContext* context, const v1::PullParametersRequest* request,
                              grpc::ServerWriter<v1::PullParametersReply>* writer) override {
    if (absl::Status checked = CheckText(*request); !checked.ok()) return ToGrpc(checked);
    return ToGrpc(daemon_.PullParameters(
        *request, CallerGone(context),
        [writer](const v1::PullParametersReply& reply) { return writer->Write(reply); }));
  }
  grpc::Status SubmitStep(ServerContext* context, const v1::SubmitStepRequest* request,
                          v1::SubmitStepReply* reply) override {
    return Checked(*request, reply,
                   [&] { return daemon_.SubmitStep(*request, CallerGone(context)); });
  }
  grpc::Status WaitStep(ServerContext* context, const v1::WaitStepRequest* request,
                        v1::WaitStepReply* reply) override {
    return Checked(*request, reply,
                   [&] { return daemon_.WaitStep(*request, CallerGone(context)); });
  }
  grpc::Status WatchSession(ServerContext* context, const v1::WatchSessionRequest* request,
                            grpc::ServerWriter<v1::SessionEvent>* writer) override {
    return ToGrpc(daemon_.WatchSession(
        *request, CallerGone(context),
        [writer](const v1::SessionEvent& event) { return writer->Write(event); }));
  }
  grpc::Status AckRollback(ServerContext* context, const v1::AckRollbackRequest* request,
                           v1::AckRollbackReply* reply) override {
    return Checked(*request, reply,
                   [&] { return daemon_.AckRollback(*request, CallerGone(context)); });
  }
  grpc::Status SaveSnapshot(ServerContext* context, const v1::SaveSnapshotRequest* request,
                            v1::SaveSnapshotReply* reply) override {
    return Checked(*request, reply,
                   [&] { return daemon_.SaveSnapshot(*request, CallerGone(context)); });
  }
  grpc::Status LoadSnapshot(ServerContext* context, const v1::LoadSnapshotRequest* request,
                            v1::LoadSnapshotReply* reply) override {
    return Checked(*request, reply,
                   [&] { return daemon_.LoadSnapshot(*request, CallerGone(context)); });
  }
  grpc::Status CloseSession(ServerContext* /*context*/, const v1::CloseSessionRequest* request,
                            v1::CloseSessionReply* reply) override {
    return Checked(*request, reply, [&] { return daemon_.CloseSession(*request); });
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
