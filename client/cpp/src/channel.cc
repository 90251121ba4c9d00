#include "client/cpp/src/channel.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/src/status.h"
#include "dmuond/client/errors.h"
#include "dmuond/wire/layout_parts.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"

namespace dmuond::client {
namespace {

constexpr int kMessageBytesMax = 4 << 20;  // the daemon's; what may be larger goes in parts
constexpr std::chrono::seconds kRepeatFor{10};
constexpr std::chrono::milliseconds kReconnectGlance{200};
// In the time after which a daemon counts as stopped.
constexpr int kPings = 8;
constexpr int64_t kSilentMsMax = 24LL * 3600 * 1000;
// Long enough for the attach socket's end to show after a call has failed for the same reason; and
// a look at it before the call is repeated.
constexpr std::chrono::milliseconds kGoneGrace{1000};
constexpr std::chrono::milliseconds kGoneGlance{20};

}  // namespace

Channel::Channel(const std::string& path, std::chrono::milliseconds silent_for, GoneWithin gone,
                 std::function<std::string()> how_it_ended)
    : gone_(std::move(gone)), how_it_ended_(std::move(how_it_ended)) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMessageBytesMax);
  arguments.SetMaxSendMessageSize(kMessageBytesMax);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // Sessions of one process must not share a connection: each ends with its own.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, "localhost");
  // Nor what a network needs: retries of gRPC's own (calls are repeated below), compression,
  // tracing. Deadlines stay.
  arguments.SetInt(GRPC_ARG_MINIMAL_STACK, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_DEADLINE_CHECKS, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  // A local socket needs no courtesy: gRPC's own first pause is a second. What it calls the least
  // pause is how long a connection may take to stand, on a busy machine more than a few
  // milliseconds.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  // Most calls wait as long as the daemon wants, and one that is stopped says nothing.
  const auto silent_ms = static_cast<int>(std::min<int64_t>(silent_for.count(), kSilentMsMax));
  const int ping_ms = silent_ms / kPings;
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, ping_ms);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, silent_ms - ping_ms);
  arguments.SetInt("grpc.http2.ping_timeout_ms", silent_ms - ping_ms);  // newer gRPC: a minute
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  channel_ = grpc::CreateCustomChannel(absl::StrCat("unix:", path),
                                       grpc::InsecureChannelCredentials(), arguments);
  stub_ = v1::Trainer::NewStub(channel_);
}

absl::Status Channel::Repeat(const char* name, Policy policy,
                             const std::function<grpc::Status(grpc::ClientContext&)>& attempt) {
  using std::chrono::steady_clock;
  const auto deadline = std::chrono::system_clock::now() + policy.timeout;  // as gRPC counts
  std::optional<steady_clock::time_point> give_up;
  for (;;) {
    const auto start = steady_clock::now();
    grpc::ClientContext context;
    context.set_deadline(deadline);
    const grpc::Status status = attempt(context);
    if (status.ok()) return absl::OkStatus();
    absl::Status error = FromGrpc(name, status);
    // The daemon's gRPC is short of memory, through whomever, and has broken the call off.
    const bool shed = absl::IsResourceExhausted(error) && ReasonOf(error).empty() &&
                      status.error_message().find("RST_STREAM") != std::string::npos;
    if (shed) error = absl::UnavailableError(error.message());
    // With a reason it is the daemon that says so.
    if (!(absl::IsUnavailable(error) || absl::IsCancelled(error)) || !ReasonOf(error).empty()) {
      return error;
    }
    const auto now = steady_clock::now();
    // From the first failure in a row: while an attempt waited, the connection was good.
    if (!give_up.has_value() || now - start > kRepeatFor) give_up = now + kRepeatFor;
    const bool again = absl::IsUnavailable(error) && policy.repeat && now < *give_up;
    if (gone_(again ? kGoneGlance : kGoneGrace)) return DaemonLost(name, how_it_ended_());
    if (!again && absl::IsUnavailable(error) && policy.repeat) {
      return MakeError(
          absl::StatusCode::kUnavailable, kDaemonUnreachable,
          absl::StrCat(error.message(),
                       "; the daemon does not answer, and has not ended: is it stopped?"));
    }
    if (!again) return error;
    channel_->WaitForConnected(std::chrono::system_clock::now() + kReconnectGlance);
  }
}

absl::Status Channel::RegisterLayout(const v1::RegisterLayoutRequest& request,
                                     v1::RegisterLayoutReply& reply) {
  return Repeat("RegisterLayout", {}, [&](grpc::ClientContext& context) {
    return wire::RegisterLayout(*stub_, &context, request, &reply);
  });
}

absl::Status Channel::Push(const std::vector<v1::PushParametersRequest>& messages,
                           v1::PushParametersReply& reply) {
  return Repeat("PushParameters", {}, [&](grpc::ClientContext& context) {
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
  absl::Status taken;
  absl::Status pulled = Repeat("PullParameters", {}, [&](grpc::ClientContext& context) {
    const auto reader = stub_->PullParameters(&context, request);
    v1::PullParametersReply reply;
    while (taken.ok() && reader->Read(&reply)) taken = take(reply);
    if (!taken.ok()) context.TryCancel();
    const grpc::Status status = reader->Finish();
    return taken.ok() ? status : grpc::Status::OK;
  });
  return taken.ok() ? pulled : taken;
}

}  // namespace dmuond::client
