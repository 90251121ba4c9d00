#include "server/storage/checksum.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "server/storage/xxh3_state.h"

namespace dmuond::server::storage {
namespace {

std::string ToHex(uint64_t value) { return absl::StrFormat("%016x", value); }

void Update(XXH3_state_t& state, const void* data, size_t bytes) {
#if defined(__x86_64__)
  static const bool avx2 = __builtin_cpu_supports("avx2") != 0;
  if (avx2) return UpdateWithAvx2(state, data, bytes);
#endif
  XXH3_64bits_update(&state, data, bytes);
}

}  // namespace

struct Checksum::State {
  XXH3_state_t xxh3;
};

Checksum::Checksum() : state_(std::make_unique<State>()) { Reset(); }
Checksum::~Checksum() = default;

void Checksum::Reset() { XXH3_64bits_reset(&state_->xxh3); }
void Checksum::Add(std::span<const std::byte> data) {
  Update(state_->xxh3, data.data(), data.size());
}
std::string Checksum::Hex() const { return ToHex(XXH3_64bits_digest(&state_->xxh3)); }

uint64_t Checksum64Of(std::span<const std::byte> data) {
  return XXH3_64bits(data.data(), data.size());
}

std::string ChecksumOf(std::span<const std::byte> data) { return ToHex(Checksum64Of(data)); }
std::string ChecksumOf(const std::string& text) {
  return ToHex(XXH3_64bits(text.data(), text.size()));
}

bool IsChecksum(const std::string& text) {
  return text.size() == kChecksumDigits && std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

}  // namespace dmuond::server::storage
