#include "server/daemon/errors.h"

#include <cstdint>
#include <optional>

#include "absl/strings/cord.h"

namespace dmuond::server {
namespace {

constexpr char kReasonPayload[] = "dmuond/reason";
constexpr char kMetadataPayload[] = "dmuond/metadata";

// Metadata as one payload: length (decimal), ':', bytes, for each key and each value in turn. A
// payload is bytes, and this keeps protobuf out of everything that only returns errors.
std::string Pack(const ErrorMetadata& metadata) {
  std::string packed;
  const auto append = [&packed](const std::string& text) {
    packed += std::to_string(text.size());
    packed += ':';
    packed += text;
  };
  for (const auto& [key, value] : metadata) {
    append(key);
    append(value);
  }
  return packed;
}

// Takes one string off the front of `rest`; nothing where it is malformed.
std::optional<std::string> TakeOne(absl::string_view& rest) {
  size_t size = 0;
  size_t digits = 0;
  while (digits < rest.size() && rest[digits] >= '0' && rest[digits] <= '9' && digits < 9) {
    size = (size * 10) + static_cast<size_t>(rest[digits++] - '0');
  }
  if (digits == 0 || digits == rest.size() || rest[digits] != ':') return std::nullopt;
  rest.remove_prefix(digits + 1);
  if (size > rest.size()) return std::nullopt;
  std::string text(rest.substr(0, size));
  rest.remove_prefix(size);
  return text;
}

}  // namespace

absl::Status Error(absl::StatusCode code, absl::string_view reason, absl::string_view message,
                   const ErrorMetadata& metadata) {
  absl::Status status(code, message);
  status.SetPayload(kReasonPayload, absl::Cord(reason));
  if (!metadata.empty()) status.SetPayload(kMetadataPayload, absl::Cord(Pack(metadata)));
  return status;
}

std::string ReasonOf(const absl::Status& status) {
  const absl::optional<absl::Cord> reason = status.GetPayload(kReasonPayload);
  return reason.has_value() ? std::string(*reason) : std::string();
}

ErrorMetadata MetadataOf(const absl::Status& status) {
  ErrorMetadata metadata;
  const absl::optional<absl::Cord> payload = status.GetPayload(kMetadataPayload);
  if (!payload.has_value()) return metadata;
  const std::string packed(*payload);
  absl::string_view rest = packed;
  while (!rest.empty()) {
    std::optional<std::string> key = TakeOne(rest);
    std::optional<std::string> value = key.has_value() ? TakeOne(rest) : std::nullopt;
    if (!value.has_value()) break;
    metadata.emplace_back(*std::move(key), *std::move(value));
  }
  return metadata;
}

absl::Status WithReason(absl::Status status, absl::string_view reason) {
  if (!status.ok() && ReasonOf(status).empty()) {
    status.SetPayload(kReasonPayload, absl::Cord(reason));
  }
  return status;
}

}  // namespace dmuond::server
