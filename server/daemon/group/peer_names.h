// The names that the certificates of a group's nodes have (--peer_tls_names).
#ifndef DMUOND_SERVER_DAEMON_GROUP_PEER_NAMES_H_
#define DMUOND_SERVER_DAEMON_GROUP_PEER_NAMES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace dmuond::server {

// The names by node, from a pattern with "{rank}" in it, as in "node{rank}.cluster", or from a list
// with commas; none from an empty text. INVALID_ARGUMENT, to be read after flag and value: a node
// would have no name, or two the same.
[[nodiscard]] absl::StatusOr<std::vector<std::string>> NamesByNode(const std::string& text,
                                                                   int32_t nodes);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_PEER_NAMES_H_
