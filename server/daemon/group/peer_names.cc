#include "server/daemon/group/peer_names.h"

#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"

namespace dmuond::server {

absl::StatusOr<std::vector<std::string>> NamesByNode(const std::string& text, int32_t nodes) {
  if (text.empty()) return std::vector<std::string>();
  std::vector<std::string> names = absl::StrSplit(text, ',');
  if (names.size() == 1 && absl::StrContains(text, "{rank}")) {
    names.clear();
    for (int32_t node = 0; node < nodes; ++node) {
      names.push_back(absl::StrReplaceAll(text, {{"{rank}", absl::StrCat(node)}}));
    }
  }
  if (names.size() != static_cast<size_t>(nodes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("has ", names.size(), " names for ", nodes,
                     " nodes: give one for each, with commas, or one with {rank} in it"));
  }
  std::set<std::string> seen;
  for (const std::string& name : names) {
    if (name.empty() || absl::StrContains(name, "*") || !seen.insert(name).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("has '", name, "': every node needs a name of its own, without wildcards"));
    }
  }
  return names;
}

}  // namespace dmuond::server
