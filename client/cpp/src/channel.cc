#include "client/cpp/src/channel.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/src/status.h"
#include "dmuond/client/errors.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"

namespace dmuond::client {
namespace {

using Clock = std::chrono::system_clock;

constexpr int kMessageBytesMax = 256 << 20;  // layouts of many thousand parameters
constexpr std::chrono::seconds kRepeatFor{10};
// Long enough for the attach socket's end to show after a call has failed for the same reason.
constexpr std::chrono::milliseconds kGoneGrace{1000};

}  // namespace

Channel::Channel(const std::string& path, GoneWithin gone) : gone_(std::move(gone)) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMessageBytesMax);
  arguments.SetMaxSendMessageSize(kMessageBytesMax);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // Sessions of one process must not share a connection: each ends with its own.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, "localhost");
  // A local socket needs no courtesy: gRPC's own first pause is a second.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  channel_ = grpc::CreateCustomChannel(absl::StrCat("unix:", path),
                                       grpc::InsecureChannelCredentials(), arguments);
  stub_ = v1::Trainer::NewStub(channel_);
}

absl::Status Channel::Translate(const char* name, const grpc::Status& status) const {
  absl::Status error = FromGrpc(name, status);
  const bool broken = status.error_code() == grpc::StatusCode::UNAVAILABLE ||
                      status.error_code() == grpc::StatusCode::CANCELLED;
  // With a reason it is the daemon that says so.
  if (broken && ReasonOf(error).empty() && gone_(kGoneGrace)) return DaemonLost(name);
  return error;
}

absl::Status Channel::Repeat(const char* name, Policy policy,
                             const std::function<grpc::Status(grpc::ClientContext&)>& attempt) {
  const Clock::time_point give_up = Clock::now() + kRepeatFor;
  for (;;) {
    grpc::ClientContext context;
    context.set_deadline(Clock::now() + policy.timeout);
    const grpc::Status status = attempt(context);
    if (status.ok()) return absl::OkStatus();
    absl::Status error = Translate(name, status);
    const bool cut = absl::IsUnavailable(error) && ReasonOf(error).empty();
    if (!cut || !policy.repeat || Clock::now() >= give_up) return error;
    if (!channel_->WaitForConnected(give_up)) return error;
  }
}

absl::Status Channel::Push(const std::vector<v1::PushParametersRequest>& messages,
                           v1::PushParametersReply& reply) {
  return Repeat("PushParameters", {.repeat = false}, [&](grpc::ClientContext& context) {
    const auto writer = stub_->PushParameters(&context, &reply);
    for (const v1::PushParametersRequest& message : messages) {
      // A stream that broke says why in Finish().
      if (!writer->Write(message)) break;
    }
    writer->WritesDone();
    return writer->Finish();
  });
}

absl::Status Channel::Pull(
    const v1::PullParametersRequest& request,
    const std::function<absl::Status(const v1::PullParametersReply&)>& take) {
  grpc::ClientContext context;
  const auto reader = stub_->PullParameters(&context, request);
  v1::PullParametersReply reply;
  absl::Status taken;
  while (taken.ok() && reader->Read(&reply)) taken = take(reply);
  if (!taken.ok()) context.TryCancel();
  const grpc::Status status = reader->Finish();
  if (!taken.ok()) return taken;
  return status.ok() ? absl::OkStatus() : Translate("PullParameters", status);
}

}  // namespace dmuond::client
