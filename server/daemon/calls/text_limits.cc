#include "server/daemon/calls/text_limits.h"

#include <cstddef>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"
#include "scheduler/limits.h"
#include "server/common/errors.h"

namespace dmuond::server {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

struct Limit {
  size_t bytes_max;
  const char* reason = "STRING_TOO_LONG";
};

// A sentence for people: names of parameters, why a job is ended, by which rule a route was chosen.
constexpr Limit kText = {scheduler::kNameBytesMax};

const std::map<std::string, Limit>& Limits() {
  // Name, version, host and pid: a host has at most 253 bytes, of which people read the first.
  constexpr Limit kClient = {256};
  constexpr Limit kJob = {128, "JOB_NAME_INVALID"};  // is part of a file's name
  static const auto& limits = *new std::map<std::string, Limit>{
      {"dmuond.v1.HelloRequest.client", kClient},
      {"dmuond.v1.OpenSessionRequest.client", kClient},
      {"dmuond.v1.OpenSessionRequest.job", kJob},
      {"dmuond.v1.EndJobRequest.name", kJob},
      {"dmuond.v1.AcceptLanesRequest.name", kJob},
      // A launcher's run id with host and port: torchrun's has 32 bytes or what its user chose.
      {"dmuond.v1.OpenSessionRequest.launch", {128}},
      {"dmuond.v1.OpenSessionRequest.device_uuid", {128}},  // "GPU-" and 36 bytes, or MIG's 50
      {"dmuond.v1.Arena.CudaIpc.device_uuid", {128}},
      {"dmuond.v1.OpenSessionRequest.nonce", {64}},    // 16 bytes, of the attach socket
      {"dmuond.v1.OpenSessionRequest.token", {4096}},  // a file's contents; a JWT has 1 KiB
      {"dmuond.v1.Parameter.name", {scheduler::kNameBytesMax, "LAYOUT_INVALID"}},
      {"dmuond.v1.GroupConfig.preset", {64, "LAYOUT_INVALID"}},  // the longest has nine bytes
      {"dmuond.v1.SetLogLevelRequest.level", {64}},              // the longest has five
  };
  return limits;
}

// Whether strings can be in such a message at all: most of a layout is numbers.
bool HasText(const Descriptor& type) {
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    if (field.cpp_type() == FieldDescriptor::CPPTYPE_STRING) return true;
    if (field.message_type() != nullptr && HasText(*field.message_type())) return true;
  }
  return false;
}

absl::Status CheckField(const FieldDescriptor& field, const std::string& value,
                        const std::string& path) {
  const auto found = Limits().find(field.full_name());
  const bool data = field.type() == FieldDescriptor::TYPE_BYTES;
  if (found == Limits().end() && data) return absl::OkStatus();
  const Limit limit = found == Limits().end() ? kText : found->second;
  if (value.size() <= limit.bytes_max) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, limit.reason,
               Say(Named("field", path), " has ", Named("bytes", value.size()), " bytes; at most ",
                   Named("bytes_max", limit.bytes_max), " are allowed"));
}

absl::Status Check(const Message& message, const std::string& path) {
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  const Descriptor& type = *message.GetDescriptor();
  std::string scratch;
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    const bool text = field.cpp_type() == FieldDescriptor::CPPTYPE_STRING;
    if (!text && (field.message_type() == nullptr || !HasText(*field.message_type()))) continue;
    const std::string name = absl::StrCat(path, field.name());
    if (field.is_repeated()) {
      for (int j = 0; j < reflection.FieldSize(message, &field); ++j) {
        const std::string at = absl::StrCat(name, "[", j, "]");
        absl::Status checked =
            text ? CheckField(field,
                              reflection.GetRepeatedStringReference(message, &field, j, &scratch),
                              at)
                 : Check(reflection.GetRepeatedMessage(message, &field, j), absl::StrCat(at, "."));
        if (!checked.ok()) return checked;
      }
    } else if (text) {
      absl::Status checked =
          CheckField(field, reflection.GetStringReference(message, &field, &scratch), name);
      if (!checked.ok()) return checked;
    } else if (reflection.HasField(message, &field)) {
      absl::Status checked = Check(reflection.GetMessage(message, &field), absl::StrCat(name, "."));
      if (!checked.ok()) return checked;
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckText(const Message& request) { return Check(request, ""); }

}  // namespace dmuond::server
