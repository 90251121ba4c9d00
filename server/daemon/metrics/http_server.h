// A small HTTP server for pages that are read: GET and HEAD, without TLS and without a log of
// requests. One thread has all connections and waits for none of them: who is slow, or sends
// nothing, costs a descriptor for seconds and keeps nobody waiting. When an address has too many,
// its oldest is closed. A few threads make pages, and one page at a time each.
//
//   auto server = HttpServer::Start("127.0.0.1:9464", {.at_once = …, .page = …});
//
// Threads: any.
#ifndef DMUOND_SERVER_DAEMON_METRICS_HTTP_SERVER_H_
#define DMUOND_SERVER_DAEMON_METRICS_HTTP_SERVER_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace dmuond::server {

class HttpServer {
 public:
  static constexpr int kConnectionsMax = 128;

  struct Answer {
    int status = 200;
    std::string type;  // of the content
    std::string body;
  };
  // The path of a request, without its query, as it was sent.
  struct Pages {
    // What waits for nothing; called on the thread that has the connections. Nullopt: `page` has
    // it.
    std::function<std::optional<Answer>(const std::string& path)> at_once;
    std::function<Answer(const std::string& path)> page;  // several at a time
  };

  // Listens on `address`, a host:port, and serves until it is destroyed. UNAVAILABLE, reason
  // ADDRESS_TAKEN, names the address and says why nobody can listen there.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address,
                                                                         Pages pages);
  virtual ~HttpServer() = default;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_METRICS_HTTP_SERVER_H_
