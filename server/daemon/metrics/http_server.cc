#include "server/daemon/metrics/http_server.h"

#include <civetweb.h>

#include <array>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/common/errors.h"

namespace dmuond::server {
namespace {

// One request at a time each. Further ones wait here, and then in the kernel's queue.
constexpr char kThreads[] = "4";
constexpr char kQueue[] = "16";
constexpr char kRequestMs[] = "5000";
constexpr char kRequestBytesMax[] = "8192";

const char* ReasonPhrase(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    default:
      return "Error";
  }
}

// The page loads nothing, and no other page may show it in a frame.
constexpr char kAlways[] =
    "Cache-Control: no-store\r\n"
    "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; "
    "frame-ancestors 'none'\r\n"
    "X-Content-Type-Options: nosniff\r\n"
    "Connection: close\r\n\r\n";

}  // namespace

// What civetweb calls.
struct HttpCallbacks {
  static int OnRequest(mg_connection* connection) {
    const mg_request_info& request = *mg_get_request_info(connection);
    const auto& server = *static_cast<HttpServer*>(request.user_data);
    const absl::string_view method = request.request_method;
    const bool head = method == "HEAD";
    const HttpServer::Answer answer =
        head || method == "GET"
            ? server.handler_(request.local_uri == nullptr ? "" : request.local_uri)
            : HttpServer::Answer{405, "text/plain; charset=utf-8", "GET and HEAD alone\n"};
    std::string text = absl::StrCat("HTTP/1.1 ", answer.status, " ", ReasonPhrase(answer.status),
                                    "\r\n", answer.status == 405 ? "Allow: GET, HEAD\r\n" : "",
                                    "Content-Type: ", answer.type,
                                    "\r\nContent-Length: ", answer.body.size(), "\r\n", kAlways);
    if (!head) text += answer.body;
    mg_write(connection, text.data(), text.size());  // fails where the caller has gone
    return answer.status;
  }

  // Of what goes wrong later, strangers are the cause: it is not for the log.
  static int OnMessage(const mg_connection* /*connection*/, const char* message) {
    if (why_not != nullptr) absl::StrAppend(why_not, why_not->empty() ? "" : "; ", message);
    return 1;
  }

  // Set while this thread starts a server: what civetweb says meanwhile.
  static thread_local std::string* why_not;
};

thread_local std::string* HttpCallbacks::why_not = nullptr;

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& address,
                                                              Handler handler) {
  std::unique_ptr<HttpServer> server(new HttpServer(std::move(handler)));
  mg_callbacks callbacks;
  std::memset(&callbacks, 0, sizeof(callbacks));
  callbacks.begin_request = &HttpCallbacks::OnRequest;
  callbacks.log_message = &HttpCallbacks::OnMessage;
  // No document_root: there are no files to be had.
  std::array<const char*, 13> options = {"listening_ports",
                                         address.c_str(),
                                         "num_threads",
                                         kThreads,
                                         "connection_queue",
                                         kQueue,
                                         "request_timeout_ms",
                                         kRequestMs,
                                         "max_request_size",
                                         kRequestBytesMax,
                                         "enable_keep_alive",
                                         "no",
                                         nullptr};
  std::string why_not;
  HttpCallbacks::why_not = &why_not;
  server->context_ = mg_start(&callbacks, server.get(), options.data());
  HttpCallbacks::why_not = nullptr;
  if (server->context_ == nullptr) {
    return Error(absl::StatusCode::kUnavailable, "ADDRESS_TAKEN",
                 Say("cannot listen on '", Named("address", address), "' for metrics: ", why_not));
  }
  return server;
}

HttpServer::~HttpServer() {
  if (context_ != nullptr) mg_stop(context_);
}

}  // namespace dmuond::server
