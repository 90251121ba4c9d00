#include <cstddef>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/support/status.h"
#include "scheduler/shown.h"
#include "server/common/errors.h"

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

// Trailers beyond 8 KiB, gRPC's limit on metadata, are lost with the status that they carry. So the
// message may take so many bytes of them, and the metadata the second figure: in sum, and each
// value that does not fit with the others.
constexpr size_t kMessageCostMax = 4800;
constexpr size_t kMetadataBytesMax = 1500;
constexpr size_t kValueBytesMax = 64;

// A message stands there twice: with bytes that are not printed ASCII as %XX, and in base64.
size_t Cost(absl::string_view text) {
  size_t cost = text.size() * 4 / 3;
  for (const char c : text) cost += c >= ' ' && c <= '~' && c != '%' ? 1 : 3;
  return cost;
}

std::string MessageOf(const absl::Status& status) {
  // Its lines are its own; what is in them others may have written.
  std::string text;
  for (const absl::string_view line : absl::StrSplit(status.message(), '\n')) {
    absl::StrAppend(&text, text.empty() ? "" : "\n", scheduler::Shown(line, kMessageCostMax));
  }
  for (size_t bytes_max = kMessageCostMax; Cost(text) > kMessageCostMax; bytes_max /= 2) {
    text = scheduler::Shown(status.message(), bytes_max);
  }
  return text;
}

ErrorMetadata BoundedMetadata(const absl::Status& status) {
  ErrorMetadata metadata = MetadataOf(status);
  const auto bytes = [&metadata] {
    size_t sum = 0;
    for (const auto& [key, value] : metadata) sum += key.size() + value.size();
    return sum;
  };
  for (auto& [key, value] : metadata) {
    if (!scheduler::IsUtf8(value)) value = scheduler::Shown(value);
  }
  for (auto& [key, value] : metadata) {
    if (bytes() > kMetadataBytesMax) value = scheduler::Shown(value, kValueBytesMax);
  }
  while (bytes() > kMetadataBytesMax) metadata.pop_back();
  return metadata;
}

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  google::rpc::ErrorInfo info;
  info.set_reason(ReasonOrDefault(status));
  info.set_domain(kErrorDomain);
  for (const auto& [key, value] : BoundedMetadata(status)) (*info.mutable_metadata())[key] = value;
  google::rpc::Status details;
  details.set_code(static_cast<int>(status.code()));
  const std::string message = MessageOf(status);
  details.set_message(message);
  details.add_details()->PackFrom(info);
  // absl and gRPC number their codes alike.
  return {static_cast<grpc::StatusCode>(status.code()), message, details.SerializeAsString()};
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
