#include "client/cpp/src/status.h"

#include <cinttypes>
#include <cstdio>
#include <map>
#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "dmuond/client/errors.h"
#include "dmuond/v1/types.pb.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/support/status.h"

namespace dmuond::client {
namespace {

constexpr char kDomain[] = "dmuond";
constexpr char kPayload[] = "type.googleapis.com/google.rpc.ErrorInfo";

google::rpc::ErrorInfo InfoOf(const absl::Status& status) {
  google::rpc::ErrorInfo info;
  const auto payload = status.GetPayload(kPayload);
  if (!payload.has_value() || !info.ParseFromString(std::string(*payload))) info.Clear();
  return info;
}

absl::Status WithInfo(absl::Status status, const google::rpc::ErrorInfo& info) {
  status.SetPayload(kPayload, absl::Cord(info.SerializeAsString()));
  return status;
}

// gRPC itself refuses messages beyond a limit, before the daemon sees them: "Received message
// larger than max (SIZE vs. LIMIT)".
absl::Status TooLarge(const absl::Status& status) {
  const std::string message(status.message());
  if (!absl::IsResourceExhausted(status) || message.find("larger than max") == std::string::npos) {
    return status;
  }
  std::map<std::string, std::string> metadata;
  const std::string sizes = message.substr(message.rfind('(') + 1);
  uint64_t bytes = 0;
  uint64_t limit = 0;
  if (std::sscanf(sizes.c_str(), "%" SCNu64 " vs. %" SCNu64, &bytes, &limit) == 2) {
    metadata = {{"bytes", absl::StrCat(bytes)}, {"limit_bytes", absl::StrCat(limit)}};
  }
  return MakeError(status.code(), kMessageTooLarge, message, metadata);
}

}  // namespace

std::string ReasonOf(const absl::Status& status) { return InfoOf(status).reason(); }

std::map<std::string, std::string> MetadataOf(const absl::Status& status) {
  const google::rpc::ErrorInfo info = InfoOf(status);
  return {info.metadata().begin(), info.metadata().end()};
}

absl::Status MakeError(absl::StatusCode code, const char* reason, const std::string& message,
                       const std::map<std::string, std::string>& metadata) {
  google::rpc::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain(kDomain);
  info.mutable_metadata()->insert(metadata.begin(), metadata.end());
  return WithInfo(absl::Status(code, message), info);
}

absl::Status DaemonLost(absl::string_view what, absl::string_view how) {
  return MakeError(absl::StatusCode::kUnavailable, kDaemonLost,
                   absl::StrCat(what, ": ", how, "; the weights in the arenas are undefined"));
}

absl::Status WrongState(const std::string& message) {
  return MakeError(absl::StatusCode::kFailedPrecondition, kSessionState, message);
}

absl::Status RolledBack(int64_t to_step, uint32_t epoch, bool asked) {
  return MakeError(absl::StatusCode::kAborted, kRolledBack,
                   absl::StrCat("the job went back to step ", to_step),
                   {{"to_step", absl::StrCat(to_step)},
                    {"epoch", absl::StrCat(epoch)},
                    {"cause", asked ? "LOAD_SNAPSHOT" : kPeerLost}});
}

absl::Status WentBack(int64_t to_step, bool fresh_memory) {
  return MakeError(
      absl::StatusCode::kAborted, kRolledBack,
      absl::StrCat("the job went back to step ", to_step, ": continue from there"),
      {{"to_step", absl::StrCat(to_step)}, {"fresh_memory", fresh_memory ? "true" : "false"}});
}

absl::Status StateLost(const std::string& message) {
  return MakeError(absl::StatusCode::kDataLoss, kStateLost, message);
}

absl::Status Aborted(const Outcome& outcome) {
  const std::string message = absl::StrCat("step ", outcome.step, " was aborted: ", outcome.detail);
  if (outcome.reason == Outcome::Reason::kStateLost) return StateLost(message);
  const auto reason = static_cast<v1::Outcome::Reason>(outcome.reason);
  return MakeError(absl::StatusCode::kAborted,
                   v1::Outcome::Reason_Name(reason).substr(sizeof("REASON_") - 1).c_str(), message);
}

absl::Status FromGrpc(const char* name, const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  // absl and gRPC number their codes alike.
  absl::Status error(static_cast<absl::StatusCode>(status.error_code()),
                     absl::StrCat(name, ": ", status.error_message()));
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details()) || details.details().empty()) {
    return TooLarge(error);
  }
  for (const auto& detail : details.details()) {
    google::rpc::ErrorInfo info;
    if (detail.UnpackTo(&info) && info.domain() == kDomain) return WithInfo(error, info);
  }
  return error;
}

}  // namespace dmuond::client
