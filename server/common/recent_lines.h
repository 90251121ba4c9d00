// The end of the log, for a page that shows it.
#ifndef DMUOND_SERVER_COMMON_RECENT_LINES_H_
#define DMUOND_SERVER_COMMON_RECENT_LINES_H_

#include <string>
#include <vector>

namespace dmuond::server::log {

// The last lines of level info and above, at most 64, oldest first, each without its end. Any
// thread may ask.
[[nodiscard]] std::vector<std::string> RecentLines();

}  // namespace dmuond::server::log

#endif  // DMUOND_SERVER_COMMON_RECENT_LINES_H_
