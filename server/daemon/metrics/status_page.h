// /statusz, a page for people: is my run all right, and if not, who is missing? And /routing, every
// parameter with its owners. Both are made here whole, and load nothing.
#ifndef DMUOND_SERVER_DAEMON_METRICS_STATUS_PAGE_H_
#define DMUOND_SERVER_DAEMON_METRICS_STATUS_PAGE_H_

#include <chrono>
#include <string>
#include <vector>

#include "server/daemon/core.h"

namespace dmuond::server {

// `places`: a picture of each place for a job, one at least. `started` is when the process began;
// `events` are lines, oldest first.
[[nodiscard]] std::string StatusPage(const std::vector<Core::Seen>& places,
                                     std::chrono::steady_clock::time_point started,
                                     const std::vector<std::string>& events);

[[nodiscard]] std::string RoutingPage(const std::vector<Core::Seen>& places);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_METRICS_STATUS_PAGE_H_
