// The names that the certificates of a group's nodes have (--peer_tls_names).
#ifndef DMUOND_SERVER_DAEMON_GROUP_PEER_NAMES_H_
#define DMUOND_SERVER_DAEMON_GROUP_PEER_NAMES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace dmuond::server {

// By node: of one pattern with "{rank}" in it, as in "node{rank}.cluster", or of a list with
// commas. Nothing for an empty text. INVALID_ARGUMENT, to be read after flag and value: there is
// not one for each node, or two nodes would have the same.
[[nodiscard]] absl::StatusOr<std::vector<std::string>> NamesByNode(const std::string& text,
                                                                   int32_t nodes);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_PEER_NAMES_H_
