#include <string>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/support/status.h"
#include "server/daemon/errors.h"

namespace dmuond::server {
namespace {

std::string ReasonOrDefault(const absl::Status& status) {
  std::string reason = ReasonOf(status);
  if (!reason.empty()) return reason;
  if (status.code() == absl::StatusCode::kInternal || status.code() == absl::StatusCode::kUnknown) {
    return "INTERNAL_ERROR";
  }
  return absl::StatusCodeToString(status.code());
}

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  google::rpc::ErrorInfo info;
  info.set_reason(ReasonOrDefault(status));
  info.set_domain(kErrorDomain);
  for (const auto& [key, value] : MetadataOf(status)) (*info.mutable_metadata())[key] = value;
  google::rpc::Status details;
  details.set_code(static_cast<int>(status.code()));
  details.set_message(std::string(status.message()));
  details.add_details()->PackFrom(info);
  // absl and gRPC number their codes alike.
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message()),
          details.SerializeAsString()};
}

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const auto code = static_cast<absl::StatusCode>(status.error_code());
  google::rpc::Status details;
  if (details.ParseFromString(status.error_details())) {
    for (const auto& detail : details.details()) {
      google::rpc::ErrorInfo info;
      if (!detail.UnpackTo(&info) || info.domain() != kErrorDomain) continue;
      const ErrorMetadata metadata(info.metadata().begin(), info.metadata().end());
      return Error(code, info.reason(), status.error_message(), metadata);
    }
  }
  return {code, status.error_message()};
}

}  // namespace dmuond::server
