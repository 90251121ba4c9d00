#include "server/daemon/metrics/pages.h"

#include "server/common/recent_lines.h"
#include "server/daemon/metrics/metrics.h"
#include "server/daemon/metrics/status_page.h"

namespace dmuond::server {
namespace {

constexpr char kHtml[] = "text/html; charset=utf-8";
constexpr char kText[] = "text/plain; charset=utf-8";

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
  return {404, kText, "There are /statusz, /routing, /metrics, /livez and /readyz.\n"};
}

std::optional<HttpServer::Answer> ProbeAt(const std::string& path, Readiness& readiness) {
  if (path != "/livez" && path != "/readyz") return std::nullopt;
  const v1::GetReadinessReply now = readiness.Now();
  if (path == "/livez" ? now.live() : now.ready()) return HttpServer::Answer{200, kText, "ok\n"};
  return HttpServer::Answer{503, kText, now.why_not() + "\n"};
}

}  // namespace dmuond::server
