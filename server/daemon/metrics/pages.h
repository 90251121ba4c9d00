// The pages of --metrics_address.
#ifndef DMUOND_SERVER_DAEMON_METRICS_PAGES_H_
#define DMUOND_SERVER_DAEMON_METRICS_PAGES_H_

#include <string>

#include "server/daemon/daemon.h"
#include "server/daemon/metrics/http_server.h"

namespace dmuond::server {

// /metrics, /statusz and /routing; every other path says so. It waits for a picture of the node for
// a second at most, and takes an older one then.
[[nodiscard]] HttpServer::Answer PageAt(const std::string& path, Daemon& daemon);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_METRICS_PAGES_H_
