// A small HTTP server for pages that are read: GET and HEAD, without TLS and without a log of
// requests. It runs civetweb, with few threads of its own; a request may take five seconds to come
// and its answer five to leave, so that who is slow, or sends nothing, keeps the others waiting for
// no longer.
//
//   auto server = HttpServer::Start("127.0.0.1:9464", [](const std::string& path) { … });
//
// Threads: any. The handler is called on the server's threads, several at a time.
#ifndef DMUOND_SERVER_DAEMON_METRICS_HTTP_SERVER_H_
#define DMUOND_SERVER_DAEMON_METRICS_HTTP_SERVER_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

struct mg_context;

namespace dmuond::server {

class HttpServer {
 public:
  struct Answer {
    int status = 200;
    std::string type;  // of the content
    std::string body;
  };
  // `path` is decoded, and has no query.
  using Handler = std::function<Answer(const std::string& path)>;

  // Listens on `address`, a host:port, and serves until it is destroyed. UNAVAILABLE, reason
  // ADDRESS_TAKEN, names the address and says why nobody can listen there.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address,
                                                                         Handler handler);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

 private:
  explicit HttpServer(Handler handler) : handler_(std::move(handler)) {}

  friend struct HttpCallbacks;
  const Handler handler_;
  mg_context* context_ = nullptr;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_METRICS_HTTP_SERVER_H_
