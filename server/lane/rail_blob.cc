#include "server/lane/rail_blob.h"

#include <cstdint>
#include <cstring>

namespace dmuond::server::lane {

// For each member 4 bytes of length, and that many of the address.
void AppendAddress(const std::vector<char>& address, std::string& blob) {
  const auto length = static_cast<uint32_t>(address.size());
  blob.append(reinterpret_cast<const char*>(&length), sizeof(length));
  blob.append(address.data(), address.size());
}

std::optional<std::vector<char>> ReadAddress(absl::string_view blob, int rank, size_t bytes) {
  for (int member = 0;; ++member) {
    uint32_t length = 0;
    if (blob.size() < sizeof(length)) return std::nullopt;
    std::memcpy(&length, blob.data(), sizeof(length));
    blob.remove_prefix(sizeof(length));
    if (blob.size() < length) return std::nullopt;
    if (member < rank) {
      blob.remove_prefix(length);
      continue;
    }
    // Gloo does not check what it is given.
    if (length != bytes) return std::nullopt;
    return std::vector<char>(blob.begin(), blob.begin() + length);
  }
}

}  // namespace dmuond::server::lane
