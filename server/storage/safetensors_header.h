// The header of a safetensors file (https://github.com/huggingface/safetensors): a length of 8
// bytes, little-endian, then JSON that gives each tensor a type, a shape and a place in what
// follows. Pure: bytes to values and back.
//
// Reading is hardened, for a file may come from anywhere: lengths are limited before memory is
// taken, names are unique, types known, sizes agree with shapes, and tensors cover the data without
// overlap and without holes. An error is DATA_LOSS and names the tensor.
#ifndef DMUOND_SERVER_STORAGE_SAFETENSORS_HEADER_H_
#define DMUOND_SERVER_STORAGE_SAFETENSORS_HEADER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "scheduler/box.h"

namespace dmuond::server::storage {

// The types that dmuond's files have; others are refused by name.
enum class TensorType : uint8_t { kF32 = 1, kI64 = 2, kU8 = 3 };
[[nodiscard]] const char* Name(TensorType type);  // "F32", "I64", "U8"
[[nodiscard]] int64_t SizeOf(TensorType type);

struct TensorInfo {
  std::string name;
  TensorType type = TensorType::kF32;
  scheduler::Extents shape;
  int64_t begin = 0;  // bytes, from the end of the header
  int64_t end = 0;
  bool operator==(const TensorInfo&) const = default;
};

struct SafetensorsHeader {
  std::map<std::string, std::string> metadata;
  std::vector<TensorInfo> tensors;  // in order of their bytes
  bool operator==(const SafetensorsHeader&) const = default;
};

// The Python library's own limit on the JSON.
inline constexpr int64_t kHeaderJsonBytesMax = 100'000'000;
inline constexpr int64_t kLengthBytes = 8;
// Data begins at a multiple of this: whole pages, so that a mapped file is aligned for any type.
inline constexpr int64_t kDataAlignment = 4096;

// Places tensors one after the other, in their order. INVALID_ARGUMENT naming the tensor: a name
// that is no UTF-8 or there twice, a size beyond 63 bits, a place that is no multiple of the type's
// size (give those of larger types first). RESOURCE_EXHAUSTED: the JSON is too long.
absl::Status PlaceTensors(std::vector<TensorInfo>& tensors);

// Length word, JSON and padding, up to where the data begins. REQUIRES: placed tensors.
absl::StatusOr<std::string> EncodeHeader(const SafetensorsHeader& header);

// How many bytes of JSON the length word announces, for a file of `file_bytes`. DATA_LOSS naming
// both values where the file cannot have so many.
absl::StatusOr<int64_t> JsonBytes(std::span<const std::byte, kLengthBytes> word,
                                  int64_t file_bytes);

// The JSON, for a file with `data_bytes` after it.
absl::StatusOr<SafetensorsHeader> ParseHeader(std::span<const std::byte> json, int64_t data_bytes);

}  // namespace dmuond::server::storage

#endif  // DMUOND_SERVER_STORAGE_SAFETENSORS_HEADER_H_
