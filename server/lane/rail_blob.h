// How a member of a rail tells the others where each of them finds it: an address for each member,
// which differ by a sequence number. The daemons carry it. Pure.
#ifndef DMUOND_SERVER_LANE_RAIL_BLOB_H_
#define DMUOND_SERVER_LANE_RAIL_BLOB_H_

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace dmuond::server::lane {

// Adds the next member's address, by rank; empty for the member itself.
void AppendAddress(const std::vector<char>& address, std::string& blob);

// The address that a blob has for the member with this rank, of `bytes` bytes. Nothing: the blob
// has another length, or is cut off.
[[nodiscard]] std::optional<std::vector<char>> ReadAddress(absl::string_view blob, int rank,
                                                           size_t bytes);

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_RAIL_BLOB_H_
