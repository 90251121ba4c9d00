#include "server/storage/safetensors_header.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"
#include "server/storage/quote.h"

namespace dmuond::server::storage {
namespace {

using Json = nlohmann::json;

constexpr std::array<std::pair<TensorType, const char*>, 3> kTypes = {
    {{TensorType::kF32, "F32"}, {TensorType::kI64, "I64"}, {TensorType::kU8, "U8"}}};

// Bytes of a tensor; -1 where that is beyond 63 bits.
int64_t BytesOf(TensorType type, const scheduler::Extents& shape) {
  int64_t bytes = SizeOf(type);
  for (int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(bytes, extent, &bytes)) return -1;
  }
  return bytes;
}

// Receives the JSON piece by piece: memory follows what is kept, not what a file nests.
class Reader : public nlohmann::json_sax<Json> {
 public:
  explicit Reader(SafetensorsHeader& header) : header_(header) {}
  [[nodiscard]] const std::string& error() const { return error_; }

  bool null() override { return Unexpected("null"); }
  bool boolean(bool /*value*/) override { return Unexpected("a truth value"); }
  bool number_integer(number_integer_t /*value*/) override {
    return Unexpected("a negative number");
  }
  bool number_float(number_float_t /*value*/, const string_t& /*text*/) override {
    return Unexpected("a number that is no integer");
  }
  bool binary(binary_t& /*value*/) override { return Unexpected("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::kShape && place_ != Place::kOffsets) return Unexpected("a number");
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return Refuse(absl::StrCat("the number ", value, " is too large"));
    }
    if (place_ == Place::kOffsets) {
      offsets_.push_back(static_cast<int64_t>(value));
      return offsets_.size() <= 2 || Refuse("data_offsets are more than two");
    }
    tensor_.shape.push_back(static_cast<int64_t>(value));
    return tensor_.shape.size() <= scheduler::kDimsMax ||
           Refuse(absl::StrCat("more than ", scheduler::kDimsMax, " dimensions"));
  }

  bool string(string_t& value) override {
    if (place_ == Place::kMetadata) {
      return header_.metadata.emplace(key_, std::move(value)).second ||
             Refuse(absl::StrCat("__metadata__ has ", Quote(key_), " twice"));
    }
    if (place_ != Place::kTensor || key_ != "dtype") return Unexpected("a string");
    const auto* type = std::find_if(kTypes.begin(), kTypes.end(),
                                    [&](const auto& entry) { return value == entry.second; });
    if (type == kTypes.end()) {
      return Refuse(absl::StrCat("dtype ", Quote(value), " is none of F32, I64, U8"));
    }
    tensor_.type = type->first;
    return true;
  }

  bool start_object(std::size_t /*elements*/) override {
    switch (place_) {
      case Place::kOutside:
        place_ = Place::kTop;
        return true;
      case Place::kTop:
        place_ = key_ == "__metadata__" ? Place::kMetadata : Place::kTensor;
        seen_ = 0;
        return true;
      default:
        return Unexpected("an object");
    }
  }

  bool key(string_t& value) override {
    key_ = std::move(value);
    if (place_ == Place::kTop) return StartEntry();
    if (place_ == Place::kMetadata) return true;
    const int bit = key_ == "dtype" ? 1 : key_ == "shape" ? 2 : key_ == "data_offsets" ? 4 : 0;
    if (bit == 0) return Refuse(absl::StrCat("has the unknown field ", Quote(key_)));
    if ((seen_ & bit) != 0) return Refuse(absl::StrCat("has ", key_, " twice"));
    seen_ |= bit;
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kTensor) {
      place_ = Place::kTop;
      return EndTensor();
    }
    place_ = place_ == Place::kMetadata ? Place::kTop : Place::kOutside;
    return true;
  }

  bool start_array(std::size_t /*elements*/) override {
    if (place_ == Place::kTensor && key_ == "shape") {
      place_ = Place::kShape;
      return true;
    }
    if (place_ == Place::kTensor && key_ == "data_offsets") {
      place_ = Place::kOffsets;
      return true;
    }
    return Unexpected("an array");
  }
  bool end_array() override {
    place_ = Place::kTensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string& /*token*/,
                   const nlohmann::detail::exception& /*error*/) override {
    return Refuse(absl::StrCat("no JSON at byte ", position));
  }

 private:
  enum class Place { kOutside, kTop, kMetadata, kTensor, kShape, kOffsets };

  bool StartEntry() {
    tensor_ = TensorInfo{.name = key_};
    offsets_.clear();
    return names_.insert(key_).second || Refuse("is there twice");
  }

  bool EndTensor() {
    if (seen_ != 7) return Refuse("lacks dtype, shape or data_offsets");
    if (offsets_.size() != 2) return Refuse("data_offsets are not two");
    tensor_.begin = offsets_[0];
    tensor_.end = offsets_[1];
    const int64_t bytes = BytesOf(tensor_.type, tensor_.shape);
    if (tensor_.begin > tensor_.end || bytes != tensor_.end - tensor_.begin) {
      return Refuse(absl::StrCat("lies at bytes ", tensor_.begin, " to ", tensor_.end, "; ",
                                 Name(tensor_.type), " of shape [",
                                 absl::StrJoin(tensor_.shape, ", "), "] does not"));
    }
    header_.tensors.push_back(std::move(tensor_));
    tensor_ = {};
    return true;
  }

  bool Unexpected(const char* what) { return Refuse(absl::StrCat(what, " is unexpected")); }
  bool Refuse(const std::string& why) {
    error_ = tensor_.name.empty() ? why : absl::StrCat("tensor ", Quote(tensor_.name), ": ", why);
    return false;
  }

  SafetensorsHeader& header_;
  Place place_ = Place::kOutside;
  std::string key_;
  TensorInfo tensor_;
  std::vector<int64_t> offsets_;
  int seen_ = 0;  // fields of the tensor at hand: 1 dtype, 2 shape, 4 data_offsets
  absl::flat_hash_set<std::string> names_;
  std::string error_;
};

absl::Status Bad(const std::string& what) {
  return absl::DataLossError(absl::StrCat("safetensors header: ", what));
}

// Sorts by place and checks that the tensors fill the data exactly.
absl::Status CheckPlaces(std::vector<TensorInfo>& tensors, int64_t data_bytes) {
  std::stable_sort(tensors.begin(), tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  int64_t end = 0;
  for (const TensorInfo& tensor : tensors) {
    if (tensor.begin != end) {
      return Bad(absl::StrCat("tensor ", Quote(tensor.name), " begins at byte ", tensor.begin,
                              ", the one before ends at ", end));
    }
    if (tensor.end > data_bytes) {
      return Bad(absl::StrCat("tensor ", Quote(tensor.name), " ends at byte ", tensor.end,
                              " of the data, which has ", data_bytes));
    }
    end = tensor.end;
  }
  if (end != data_bytes) {
    return Bad(absl::StrCat("tensors end at byte ", end, " of the data, which has ", data_bytes));
  }
  return absl::OkStatus();
}

// A JSON string; of text that is UTF-8.
std::string JsonText(const std::string& text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

const char* Name(TensorType type) {
  for (const auto& [known, name] : kTypes) {
    if (known == type) return name;
  }
  return "?";
}

int64_t SizeOf(TensorType type) {
  switch (type) {
    case TensorType::kF32:
      return 4;
    case TensorType::kI64:
      return 8;
    case TensorType::kU8:
      return 1;
  }
  return 1;
}

absl::Status PlaceTensors(std::vector<TensorInfo>& tensors) {
  absl::flat_hash_set<std::string> names;
  int64_t at = 0;
  for (TensorInfo& tensor : tensors) {
    const auto refuse = [&](const std::string& why) {
      return absl::InvalidArgumentError(
          absl::StrCat("safetensors: tensor ", Quote(tensor.name), " ", why));
    };
    if (tensor.name.empty() || tensor.name == "__metadata__" || !IsUtf8(tensor.name)) {
      return refuse("has a name that a file cannot hold");
    }
    if (!names.insert(tensor.name).second) return refuse("is there twice");
    const int64_t bytes = BytesOf(tensor.type, tensor.shape);
    tensor.begin = at;
    if (bytes < 0 || __builtin_add_overflow(at, bytes, &at)) return refuse("is too large");
    tensor.end = at;
    if (tensor.begin % SizeOf(tensor.type) != 0) {
      return refuse(absl::StrCat("would lie at byte ", tensor.begin, ", no multiple of the ",
                                 SizeOf(tensor.type), " bytes of ", Name(tensor.type)));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> EncodeHeader(const SafetensorsHeader& header) {
  std::string text(kLengthBytes, '\0');
  text += "{\"__metadata__\":{";
  const char* comma = "";
  for (const auto& [key, value] : header.metadata) {
    absl::StrAppend(&text, comma, JsonText(key), ":", JsonText(value));
    comma = ",";
  }
  text += "}";
  for (const TensorInfo& tensor : header.tensors) {
    absl::StrAppend(&text, ",", JsonText(tensor.name), ":{\"dtype\":\"", Name(tensor.type),
                    "\",\"shape\":[", absl::StrJoin(tensor.shape, ","), "],\"data_offsets\":[",
                    tensor.begin, ",", tensor.end, "]}");
  }
  text += "}";
  const auto size = static_cast<int64_t>(text.size());
  const int64_t padded = (size + kDataAlignment - 1) / kDataAlignment * kDataAlignment;
  text.resize(padded, ' ');
  if (padded - kLengthBytes > kHeaderJsonBytesMax) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "safetensors: a header of ", padded - kLengthBytes, " bytes for ", header.tensors.size(),
        " tensors; at most ", kHeaderJsonBytesMax, " are possible"));
  }
  auto length = static_cast<uint64_t>(padded - kLengthBytes);
  for (int64_t i = 0; i < kLengthBytes; ++i, length >>= 8) {
    text[i] = static_cast<char>(length & 0xff);
  }
  return text;
}

absl::StatusOr<int64_t> JsonBytes(std::span<const std::byte, kLengthBytes> word,
                                  int64_t file_bytes) {
  uint64_t length = 0;
  for (size_t i = kLengthBytes; i-- > 0;)
    length = (length << 8) | std::to_integer<uint8_t>(word[i]);
  if (length > static_cast<uint64_t>(kHeaderJsonBytesMax)) {
    return Bad(absl::StrCat("announces ", length, " bytes; at most ", kHeaderJsonBytesMax,
                            " are possible"));
  }
  if (static_cast<int64_t>(length) > file_bytes - kLengthBytes) {
    return Bad(absl::StrCat("announces ", length, " bytes, the file has ",
                            file_bytes - kLengthBytes, " after the length"));
  }
  return static_cast<int64_t>(length);
}

absl::StatusOr<SafetensorsHeader> ParseHeader(std::span<const std::byte> json, int64_t data_bytes) {
  const std::string_view text(reinterpret_cast<const char*>(json.data()), json.size());
  if (text.empty() || text.front() != '{') return Bad("does not begin with '{'");
  SafetensorsHeader header;
  Reader reader(header);
  if (!Json::sax_parse(text.begin(), text.end(), &reader)) return Bad(reader.error());
  RETURN_IF_ERROR(CheckPlaces(header.tensors, data_bytes));
  return header;
}

}  // namespace dmuond::server::storage
