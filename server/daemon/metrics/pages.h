// The pages of --metrics_address, and what probes ask for there.
#ifndef DMUOND_SERVER_DAEMON_METRICS_PAGES_H_
#define DMUOND_SERVER_DAEMON_METRICS_PAGES_H_

#include <optional>
#include <string>

#include "server/daemon/daemon.h"
#include "server/daemon/metrics/http_server.h"
#include "server/daemon/process/readiness.h"

namespace dmuond::server {

// /metrics, /statusz and /routing; every other path says so. It waits for a picture of the node for
// a second at most, and takes an older one then.
[[nodiscard]] HttpServer::Answer PageAt(const std::string& path, Daemon& daemon);

// /livez and /readyz: 200, or 503 and why not. Nullopt for every other path. It waits for nothing.
[[nodiscard]] std::optional<HttpServer::Answer> ProbeAt(const std::string& path,
                                                        Readiness& readiness);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_METRICS_PAGES_H_
