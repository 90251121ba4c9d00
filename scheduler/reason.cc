#include "scheduler/reason.h"

#include <cstddef>
#include <optional>

#include "absl/strings/cord.h"

namespace dmuond::scheduler {
namespace {

constexpr char kReasonUrl[] = "dmuond/reason";
constexpr char kMetadataUrl[] = "dmuond/metadata";

// Metadata as one payload: length (decimal), ':', bytes, for each name and each value in turn. A
// payload is bytes, and this keeps protobuf out of everything that only returns errors.
std::string Pack(const Metadata& metadata) {
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

absl::Status Error(absl::StatusCode code, absl::string_view reason, const Message& message) {
  return WithMetadata(WithReason(absl::Status(code, message.text), reason), message.metadata);
}

absl::Status WithReason(absl::Status status, absl::string_view reason) {
  status.SetPayload(kReasonUrl, absl::Cord(reason));
  return status;
}

absl::Status WithMetadata(absl::Status status, const Metadata& metadata) {
  if (metadata.empty()) return status;
  Metadata all = MetadataOf(status);
  all.insert(all.end(), metadata.begin(), metadata.end());
  status.SetPayload(kMetadataUrl, absl::Cord(Pack(all)));
  return status;
}

std::string ReasonOf(const absl::Status& status) {
  const absl::optional<absl::Cord> reason = status.GetPayload(kReasonUrl);
  return reason.has_value() ? std::string(*reason) : std::string();
}

Metadata MetadataOf(const absl::Status& status) {
  Metadata metadata;
  const absl::optional<absl::Cord> payload = status.GetPayload(kMetadataUrl);
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

}  // namespace dmuond::scheduler
