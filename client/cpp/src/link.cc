#include "client/cpp/src/link.h"

#include <unistd.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/status_macros.h"
#include "client/cpp/src/convert.h"
#include "client/cpp/src/socket_owner.h"
#include "client/cpp/src/status.h"
#include "dmuond/client/errors.h"
#include "dmuond/wire/socket_path.h"

namespace dmuond::client {
namespace {

using Milliseconds = std::chrono::milliseconds;

constexpr uint32_t kProtocolVersion = 2;
constexpr Milliseconds kHelloTimeout{60'000};
// The news of a daemon's end may be slower than its successor's answer.
constexpr Milliseconds kNewsTravel{1'000};

std::string ClientName() {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  return absl::StrCat("dmuond-cpp ", host.data(), " pid ", ::getpid());
}

// The daemon's refusal, with the side to update: a daemon of before does not name one.
absl::Status OtherVersion(const absl::Status& refusal) {
  std::map<std::string, std::string> metadata = MetadataOf(refusal);
  uint32_t server = 0;
  const bool known = absl::SimpleAtoi(metadata["server_version"], &server);
  metadata["client_version"] = absl::StrCat(kProtocolVersion);
  return MakeError(
      refusal.code(), kVersionMismatch,
      absl::StrCat(refusal.message(), ". This client speaks version ", kProtocolVersion,
                   ": update ", known && server > kProtocolVersion ? "the client" : "the daemon",
                   ", so that both are of one release"),
      metadata);
}

// The answer to a registration is used as an index.
absl::Status Check(const Registered& registered, size_t parameters) {
  if (registered.parameter_bucket.size() != parameters) {
    return absl::InternalError(absl::StrCat("RegisterLayout answered for ",
                                            registered.parameter_bucket.size(), " parameters of ",
                                            parameters));
  }
  for (const int32_t bucket : registered.parameter_bucket) {
    if (bucket < -1 || bucket >= static_cast<int64_t>(registered.buckets)) {
      return absl::InternalError(
          absl::StrCat("RegisterLayout answered with bucket ", bucket, " of ", registered.buckets));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Link>> Link::Connect(const std::string& path, Milliseconds timeout,
                                                    Milliseconds silent_for) {
  std::unique_ptr<Link> link(new Link());
  Link& raw = *link;
  link->path_ = path;
  ASSIGN_OR_RETURN(link->attach_,
                   AttachSocket::Connect(path + wire::kAttachSuffix, timeout, [&raw] {
                     raw.lost_.store(true);
                     raw.memory_.Poison();
                   }));
  link->channel_ = std::make_unique<Channel>(
      path, silent_for, [&raw](Milliseconds grace) { return raw.LostWithin(grace); },
      [&raw] { return raw.HowItEnded(); });
  return link;
}

bool Link::LostWithin(Milliseconds grace) {
  // A call may see the end before the watcher's thread has run: lost() agrees with it.
  if (attach_ != nullptr && attach_->GoneWithin(grace)) lost_.store(true);
  return lost_.load();
}

absl::Status Link::Open(const Options& options, Resume resume) {
  memory_.SetArenas(options.arenas);
  const std::string client = options.client.empty() ? ClientName() : options.client;
  v1::HelloRequest hello;
  hello.set_version_min(kProtocolVersion);
  hello.set_version_max(kProtocolVersion);
  hello.set_features(v1::FEATURE_NOT_FINITE);
  hello.set_client(client);
  absl::Status status =
      channel_->Call("Hello", &v1::Trainer::Stub::Hello, hello, hello_, {.timeout = kHelloTimeout});
  if (absl::IsDeadlineExceeded(status) && ReasonOf(status).empty()) {
    return MakeError(absl::StatusCode::kUnavailable, kDaemonUnreachable,
                     absl::StrCat("Hello: the daemon has not answered for ", kHelloTimeout.count(),
                                  " ms, and has not ended: it is stopped, or gets no processor "
                                  "time"));
  }
  if (ReasonOf(status) == kVersionMismatch) return OtherVersion(status);
  if (!status.ok()) return status;
  if (hello_.version() != kProtocolVersion) {
    return OtherVersion(MakeError(
        absl::StatusCode::kFailedPrecondition, kVersionMismatch,
        absl::StrCat("Hello: ", hello_.server(), " answers in protocol version ", hello_.version()),
        {{"server_version", absl::StrCat(hello_.version())}}));
  }
  status = CheckSocketOwner(path_, attach_->fd(), options.server_uid);
  if (!status.ok()) return status;

  v1::OpenSessionRequest open;
  open.set_nonce(attach_->nonce());
  open.set_job(options.job);
  open.set_token(options.token);
  open.set_rank(options.rank);
  open.set_world_size(options.world_size);
  open.set_resume(static_cast<v1::OpenSessionRequest::Resume>(resume));
  if (resume == Resume::kDiscard) open.set_launch(options.launch);
  open.set_home_lane(options.home_lane < hello_.lanes() ? options.home_lane : -1);
  if (options.arenas != nullptr) open.set_device_uuid(options.arenas->device_uuid());
  open.set_poison_parameters(options.poison);
  open.set_client(client);
  status = channel_->Call("OpenSession", &v1::Trainer::Stub::OpenSession, open, opened_, {});
  if (status.ok()) fault::FaultPoint("trainer.opened");
  // The nonce was the predecessor's.
  if (ReasonOf(status) == "NONCE_UNKNOWN" && LostWithin(kNewsTravel)) {
    return DaemonLost("OpenSession", HowItEnded());
  }
  return status;
}

v1::SessionKey Link::Key() const {
  v1::SessionKey key;
  key.set_session(opened_.session());
  key.set_incarnation(opened_.incarnation());
  key.set_secret(opened_.secret());
  return key;
}

absl::StatusOr<Registered> Link::Register(const Layout& layout) {
  v1::RegisterLayoutRequest request;
  *request.mutable_key() = Key();
  ToProto(layout, request);
  request.set_refusals(refusals_);
  v1::RegisterLayoutReply reply;
  absl::Status status = channel_->RegisterLayout(request, reply);
  if (!status.ok()) {
    const auto metadata = MetadataOf(status);
    const auto refusals = metadata.find("refusals");
    int64_t heard = 0;
    if (refusals != metadata.end() && absl::SimpleAtoi(refusals->second, &heard)) refusals_ = heard;
    return status;
  }
  fault::FaultPoint("trainer.registered");
  Registered registered = FromProto(reply);
  RETURN_IF_ERROR(Check(registered, layout.parameters.size()));
  memory_.SetLayout(layout, registered);
  return registered;
}

absl::StatusOr<v1::AttachBuffersReply> Link::Attach(const FirstWeights& first) {
  v1::AttachBuffersRequest request;
  *request.mutable_key() = Key();
  request.mutable_weight_digests()->Add(first.digests.begin(), first.digests.end());
  request.set_broadcast(first.broadcast);
  absl::Status status = memory_.FillArenas(request);
  if (!status.ok()) return status;
  v1::AttachBuffersReply reply;
  status = channel_->Call("AttachBuffers", &v1::Trainer::Stub::AttachBuffers, request, reply, {});
  if (!status.ok()) return status;
  while (!memory_.complete()) {
    ASSIGN_OR_RETURN(AttachSocket::Received received, attach_->NextFrame());
    RETURN_IF_ERROR(memory_.Map(received));
  }
  fault::FaultPoint("trainer.attached");
  return reply;
}

void Link::Disconnect() {
  // The connection goes first: without the attach socket it is just another caller. The channel
  // asks the socket whether the daemon lives, so it must not outlive it.
  channel_.reset();
  attach_.reset();
}

}  // namespace dmuond::client
