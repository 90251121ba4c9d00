#include "server/daemon/metrics/pages.h"

#include "server/common/recent_lines.h"
#include "server/daemon/metrics/metrics.h"
#include "server/daemon/metrics/status_page.h"

namespace dmuond::server {
namespace {

constexpr char kHtml[] = "text/html; charset=utf-8";

}  // namespace

HttpServer::Answer PageAt(const std::string& path, Daemon& daemon) {
  if (path == "/metrics") {
    return {200, "text/plain; version=0.0.4; charset=utf-8",
            MetricsText(daemon.node().Look(), daemon.place(0).core.options.group_name,
                        daemon.started(), daemon.rpcs().Read())};
  }
  if (path == "/statusz")
    return {200, kHtml, StatusPage(daemon.node().Look(), daemon.started(), log::RecentLines())};
  if (path == "/routing") return {200, kHtml, RoutingPage(daemon.node().Look())};
  return {404, "text/plain; charset=utf-8", "There are /statusz, /routing and /metrics.\n"};
}

}  // namespace dmuond::server
