#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/wire/layout_parts.h"
#include "server/common/errors.h"
#include "server/daemon/calls/calls_in_flight.h"
#include "server/daemon/calls/layout_bytes.h"
#include "server/daemon/calls/queued_calls.h"
#include "server/daemon/calls/services.h"
#include "server/daemon/calls/text_limits.h"

namespace dmuond::server {
namespace {

using grpc::ServerContext;

// What `call` answers to a request whose strings are not too long.
template <typename Request, typename Reply, typename Call>
grpc::Status Checked(const Request& request, Reply* reply, const Call& call) {
  if (absl::Status checked = CheckText(request); !checked.ok()) return ToGrpc(checked);
  return Answer(call(), reply);
}

Daemon::Cancelled CallerGone(ServerContext* context) {
  return [context] { return context->IsCancelled(); };
}

absl::Status Gone() { return absl::CancelledError("the caller has gone"); }

class Trainers final : public TrainerService {
 public:
  Trainers(Daemon& daemon, AttachServer& attach, GrpcSocket& socket, StreamWatch& streams)
      : daemon_(daemon), attach_(attach), socket_(socket), streams_(streams) {}

  grpc::Status Hello(ServerContext* /*context*/, const v1::HelloRequest* request,
                     v1::HelloReply* reply) override {
    return Checked(*request, reply, [&] { return daemon_.place(0).sessions.Hello(*request); });
  }
  grpc::Status OpenSession(ServerContext* context, const v1::OpenSessionRequest* request,
                           v1::OpenSessionReply* reply) override {
    // It may wait for long: who has an attach connection is no stranger.
    if (attach_.Knows(request->nonce())) socket_.MakeKnown(*context);
    const std::optional<Caller> caller = socket_.CallerOf(*context);
    if (!caller.has_value()) return ToGrpc(Gone());
    return Checked(*request, reply,
                   [&] { return daemon_.OpenSession(*request, caller->uid, CallerGone(context)); });
  }
  grpc::Status RegisterLayout(
      ServerContext* context,
      grpc::ServerReaderWriter<v1::RegisterLayoutReply, v1::RegisterLayoutRequest>* stream)
      override {
    v1::RegisterLayoutRequest request;
    if (!ReadFirst(context, *stream, request)) {
      return ToGrpc(Error(absl::StatusCode::kInvalidArgument, "LAYOUT_INVALID",
                          "a registration begins with a part that says whose it is"));
    }
    return Keyed(context, request.key(), [&](absl::Status kept) {
      LayoutBytes::Held held(layout_bytes_, request.key().session());
      if (kept.ok()) kept = held.Add(static_cast<int64_t>(request.ByteSizeLong()));
      v1::RegisterLayoutRequest part;
      while (kept.ok() && stream->Read(&part)) {
        kept = held.Add(static_cast<int64_t>(part.ByteSizeLong()));
        if (kept.ok()) wire::Append(request, part);
      }
      if (kept.ok()) kept = CheckText(request);
      // A stream that broke is no shorter layout.
      if (kept.ok() && context->IsCancelled()) kept = Gone();
      if (!kept.ok()) return ToGrpc(kept);
      absl::StatusOr<v1::RegisterLayoutReply> reply =
          daemon_.PlaceOf(request.key()).sessions.RegisterLayout(request, CallerGone(context));
      if (!reply.ok()) return ToGrpc(reply.status());
      wire::WriteParts(*stream, *reply);  // false: the caller has gone
      return grpc::Status::OK;
    });
  }
  grpc::Status AttachBuffers(ServerContext* context, const v1::AttachBuffersRequest* request,
                             v1::AttachBuffersReply* reply) override {
    return Waiting(context, *request, reply, &Place::buffers, &AttachCalls::AttachBuffers);
  }
  grpc::Status PushParameters(ServerContext* context,
                              grpc::ServerReader<v1::PushParametersRequest>* reader,
                              v1::PushParametersReply* reply) override {
    v1::PushParametersRequest header;
    if (!ReadFirst(context, *reader, header)) {
      return ToGrpc(Error(absl::StatusCode::kInvalidArgument, "PUSH_EMPTY",
                          "a push begins with a message that says what is pushed"));
    }
    return Keyed(context, header.key(), [&](const absl::Status& /*open*/) {
      Place& place = daemon_.PlaceOf(header.key());
      PushedState state;
      v1::PushParametersRequest message;
      absl::Status kept = CheckText(header);
      if (kept.ok() && header.state()) kept = place.tensors.CheckMayPush(header.key());
      while (header.state() && kept.ok() && reader->Read(&message)) {
        kept = CheckText(message);
        for (int i = 0; kept.ok() && i < message.chunks_size(); ++i) {
          kept = place.tensors.KeepStateChunk(header.key(), message.chunks(i), state);
        }
      }
      // A stream that broke is no shorter push.
      if (kept.ok() && context->IsCancelled()) kept = Gone();
      if (!kept.ok()) return ToGrpc(kept);
      return Answer(place.steps.Push(header, state, CallerGone(context)), reply);
    });
  }
  grpc::Status PullParameters(ServerContext* context, const v1::PullParametersRequest* request,
                              grpc::ServerWriter<v1::PullParametersReply>* writer) override {
    return Keyed(context, request->key(), [&](const absl::Status& /*open*/) {
      if (absl::Status checked = CheckText(*request); !checked.ok()) return ToGrpc(checked);
      return ToGrpc(daemon_.PlaceOf(request->key())
                        .tensors.PullParameters(*request, CallerGone(context),
                                                [writer](const v1::PullParametersReply& reply) {
                                                  return writer->Write(reply);
                                                }));
    });
  }
  grpc::Status WatchSession(ServerContext* context, const v1::WatchSessionRequest* request,
                            grpc::ServerWriter<v1::SessionEvent>* writer) override {
    return Keyed(context, request->key(), [&](const absl::Status& /*open*/) {
      return ToGrpc(daemon_.PlaceOf(request->key())
                        .sessions.WatchSession(*request, CallerGone(context),
                                               [writer](const v1::SessionEvent& event) {
                                                 return writer->Write(event);
                                               }));
    });
  }
  grpc::Status AckRollback(ServerContext* context, const v1::AckRollbackRequest* request,
                           v1::AckRollbackReply* reply) override {
    return Waiting(context, *request, reply, &Place::buffers, &AttachCalls::AckRollback);
  }
  grpc::Status SaveSnapshot(ServerContext* context, const v1::SaveSnapshotRequest* request,
                            v1::SaveSnapshotReply* reply) override {
    return Waiting(context, *request, reply, &Place::snapshots, &SnapshotCalls::SaveSnapshot);
  }
  grpc::Status LoadSnapshot(ServerContext* context, const v1::LoadSnapshotRequest* request,
                            v1::LoadSnapshotReply* reply) override {
    return Waiting(context, *request, reply, &Place::snapshots, &SnapshotCalls::LoadSnapshot);
  }
  grpc::Status CloseSession(ServerContext* context, const v1::CloseSessionRequest* request,
                            v1::CloseSessionReply* reply) override {
    return Keyed(context, request->key(), [&](const absl::Status& /*open*/) {
      return Checked(*request, reply, [&] {
        return daemon_.PlaceOf(request->key()).sessions.CloseSession(*request);
      });
    });
  }

  void Serve(grpc::ServerCompletionQueue& queue) override;

 private:
  template <typename Request, typename Reply>
  struct StepMethod {
    // Has the queue bring the next call of this method.
    void (Trainers::*request)(grpc::ServerContext*, Request*,
                              grpc::ServerAsyncResponseWriter<Reply>*, grpc::CompletionQueue*,
                              grpc::ServerCompletionQueue*, void* tag);
    StateMutex::LateId (StepCalls::*begin)(const Request&, StepCalls::Answer<Reply>);
  };
  template <typename Request, typename Reply>
  class StepCall;

  // A caller that says nothing is not waited for.
  template <typename Stream, typename Message>
  bool ReadFirst(ServerContext* context, Stream& stream, Message& message) {
    const StreamWatch::First first(streams_, context);
    return stream.Read(&message);
  }

  // What every call with a key passes before it may wait. The call may not be made when it is not
  // OK. `open` gets OK, or why the key's session is not open: then the call itself says what has
  // become of it.
  absl::Status Admit(const grpc::ServerContext& context, const v1::SessionKey& key,
                     absl::Status& open, std::optional<CallsInFlight::Held>& held) {
    const std::optional<Caller> caller = socket_.CallerOf(context);
    if (!caller.has_value()) return Gone();
    open = daemon_.PlaceOf(key).sessions.CheckKey(key, &*caller);
    if (ReasonOf(open) == "SESSION_NOT_YOURS") return open;
    if (!open.ok()) return absl::OkStatus();
    socket_.MakeKnown(context);
    held.emplace(calls_, key.session());
    return held->status();
  }

  template <typename Work>
  grpc::Status Keyed(ServerContext* context, const v1::SessionKey& key, const Work& work) {
    absl::Status open;
    std::optional<CallsInFlight::Held> held;
    if (absl::Status admitted = Admit(*context, key, open, held); !admitted.ok()) {
      return ToGrpc(admitted);
    }
    return work(open);
  }

  template <typename Calls, typename Request, typename Reply>
  grpc::Status Waiting(ServerContext* context, const Request& request, Reply* reply,
                       Calls Place::*calls,
                       absl::StatusOr<Reply> (Calls::*call)(const Request&,
                                                            const Core::Cancelled&)) {
    return Keyed(context, request.key(), [&](const absl::Status& /*open*/) {
      return Checked(request, reply, [&] {
        return (daemon_.PlaceOf(request.key()).*calls.*call)(request, CallerGone(context));
      });
    });
  }

  Daemon& daemon_;
  AttachServer& attach_;
  GrpcSocket& socket_;
  StreamWatch& streams_;
  LayoutBytes layout_bytes_;
  CallsInFlight calls_;
};

// A SubmitStep or WaitStep.
template <typename Request, typename Reply>
class Trainers::StepCall final : public QueuedCall {
 public:
  // The next call of `method` that comes.
  static void Expect(Trainers& service, grpc::ServerCompletionQueue& queue,
                     StepMethod<Request, Reply> method) {
    new StepCall(service, queue, method);  // deletes itself
  }

 private:
  StepCall(Trainers& service, grpc::ServerCompletionQueue& queue, StepMethod<Request, Reply> method)
      : service_(service), queue_(queue), method_(method) {
    (service_.*method_.request)(&context_, &request_, &responder_, &queue_, &queue_, &came_);
  }

  void Begin() override {
    Expect(service_, queue_, method_);
    absl::Status open;
    absl::Status admitted = service_.Admit(context_, request_.key(), open, held_);
    if (admitted.ok()) admitted = CheckText(request_);
    if (!admitted.ok()) return responder_.FinishWithError(ToGrpc(admitted), &answered_);
    wait_ = (Steps().*method_.begin)(request_, [this](absl::StatusOr<Reply> reply) {
      if (!reply.ok()) return responder_.FinishWithError(ToGrpc(reply.status()), &answered_);
      responder_.Finish(*reply, grpc::Status::OK, &answered_);
    });
  }
  void OnGone() override { Steps().Cancel(wait_); }
  StepCalls& Steps() { return service_.daemon_.PlaceOf(request_.key()).steps; }

  Trainers& service_;
  grpc::ServerCompletionQueue& queue_;
  const StepMethod<Request, Reply> method_;
  Request request_;
  grpc::ServerAsyncResponseWriter<Reply> responder_{&context_};
  std::optional<CallsInFlight::Held> held_;
  StateMutex::LateId wait_ = 0;
};

void Trainers::Serve(grpc::ServerCompletionQueue& queue) {
  StepCall<v1::SubmitStepRequest, v1::SubmitStepReply>::Expect(
      *this, queue, {&Trainers::RequestSubmitStep, &StepCalls::SubmitStep});
  StepCall<v1::WaitStepRequest, v1::WaitStepReply>::Expect(
      *this, queue, {&Trainers::RequestWaitStep, &StepCalls::WaitStep});
}

}  // namespace

std::unique_ptr<TrainerService> MakeTrainerService(Daemon& daemon, AttachServer& attach,
                                                   GrpcSocket& socket, StreamWatch& streams) {
  return std::make_unique<Trainers>(daemon, attach, socket, streams);
}

}  // namespace dmuond::server
