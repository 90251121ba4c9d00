// What a daemon tells Prometheus, in its text format. docs/metrics.md lists every metric; a test
// compares that page with what a run gives.
//
// It reads pictures of the node and never a core, so that a scrape waits for nothing but the
// picture.
#ifndef DMUOND_SERVER_DAEMON_METRICS_METRICS_H_
#define DMUOND_SERVER_DAEMON_METRICS_METRICS_H_

#include <chrono>
#include <string>
#include <vector>

#include "server/daemon/core.h"
#include "server/daemon/rpc_counts.h"

namespace dmuond::server {

// `places`: a picture of each place for a job, one at least. `group` becomes the label of that name
// of every metric. `started` is when the process began. Times of the text are those of the
// machine's clock.
[[nodiscard]] std::string MetricsText(const std::vector<Core::Seen>& places,
                                      const std::string& group,
                                      std::chrono::steady_clock::time_point started,
                                      const RpcCounts::Counts& rpcs);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_METRICS_METRICS_H_
