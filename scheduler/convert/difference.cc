#include "scheduler/convert/difference.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/text_format.h"

namespace dmuond {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using google::protobuf::TextFormat;

constexpr int kNoIndex = -1;  // of a field that is not repeated

const Message& MessageAt(const Message& of, const FieldDescriptor* field, int index) {
  const Reflection& reflection = *of.GetReflection();
  return index == kNoIndex ? reflection.GetMessage(of, field)
                           : reflection.GetRepeatedMessage(of, field, index);
}

std::string Text(const Message& of, const FieldDescriptor* field, int index) {
  if (index == kNoIndex && field->has_presence() && !of.GetReflection()->HasField(of, field)) {
    return "none";
  }
  if (field->message_type() != nullptr) return MessageAt(of, field, index).ShortDebugString();
  std::string text;
  TextFormat::PrintFieldValueToString(of, field, index, &text);
  return text;
}

std::string Count(int count) { return count == 0 ? "none" : absl::StrCat(count, " of them"); }

}  // namespace

Difference FirstDifference(const Message& one, const Message& other) {
  const google::protobuf::Descriptor& type = *one.GetDescriptor();
  for (int f = 0; f < type.field_count(); ++f) {
    const FieldDescriptor* field = type.field(f);
    std::vector<int> places = {kNoIndex};
    if (field->is_repeated()) {
      const int count = one.GetReflection()->FieldSize(one, field);
      const int count_of_other = other.GetReflection()->FieldSize(other, field);
      if (count != count_of_other) return {field->name(), Count(count), Count(count_of_other)};
      places.clear();
      for (int i = 0; i < count; ++i) places.push_back(i);
    }
    for (const int index : places) {
      Difference found = {field->name(), Text(one, field, index), Text(other, field, index)};
      if (found.one == found.other) continue;
      if (index != kNoIndex) absl::StrAppend(&found.field, "[", index, "]");
      if (field->message_type() == nullptr || found.one == "none" || found.other == "none") {
        return found;
      }
      Difference within =
          FirstDifference(MessageAt(one, field, index), MessageAt(other, field, index));
      within.field = absl::StrCat(found.field, ".", within.field);
      return within;
    }
  }
  return {};
}

}  // namespace dmuond
