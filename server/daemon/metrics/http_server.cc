#include "server/daemon/metrics/http_server.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/mutex.h"
#include "base/unique_fd.h"
#include "dmuond/wire/start_thread.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/daemon/calls/accept_loop.h"
#include "server/daemon/calls/connection_limits.h"
#include "server/daemon/calls/tcp_listener.h"

namespace dmuond::server {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kThreads = 4;                     // that make pages
constexpr std::chrono::seconds kRequestMax{2};  // what a request may take to come
constexpr std::chrono::seconds kPartMax{5};     // to be answered, and its answer to leave, each
constexpr size_t kRequestBytesMax = 8192;
// All are strangers to the end: none proves anything.
constexpr ConnectionLimits::Limits kLimits = {.all = HttpServer::kConnectionsMax,
                                              .per_holder = 64,
                                              .strangers_per_holder = 32,
                                              .strangers = 64};

const char* ReasonPhrase(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 431:
      return "Request Header Fields Too Large";
    case 503:
      return "Service Unavailable";
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

std::string TextOf(const HttpServer::Answer& answer, bool head) {
  return absl::StrCat("HTTP/1.1 ", answer.status, " ", ReasonPhrase(answer.status), "\r\n",
                      answer.status == 405 ? "Allow: GET, HEAD\r\n" : "",
                      "Content-Type: ", answer.type, "\r\nContent-Length: ", answer.body.size(),
                      "\r\n", kAlways, head ? "" : answer.body);
}
HttpServer::Answer Plain(int status, const char* text) {
  return {status, "text/plain; charset=utf-8", text};
}

class LoopServer final : public HttpServer {
 public:
  LoopServer(Pages pages, wire::UniqueFd listener, std::unique_ptr<AcceptLoop> loop)
      : pages_(std::move(pages)),
        listener_(std::move(listener)),
        loop_(std::move(loop)),
        limits_(kLimits) {}
  // RESOURCE_EXHAUSTED: it has not the threads that it needs.
  absl::Status Start() {
    for (std::thread& maker : makers_) {
      absl::StatusOr<std::thread> started =
          wire::StartThread("pages of --metrics_address", [this] { MakePages(); });
      if (!started.ok()) return started.status();
      maker = *std::move(started);
    }
    absl::StatusOr<std::thread> started = wire::StartThread("--metrics_address", [this] {
      loop_->Run({.on_connection =
                      [this](wire::UniqueFd socket, const sockaddr_storage& from) {
                        Accept(std::move(socket), HolderOf(from));
                      },
                  .on_ready = [this](uint64_t id) { Go(id); },
                  .on_round =
                      [this] {
                        TakeMade();
                        return EndOverdue();
                      }});
    });
    if (!started.ok()) return started.status();
    thread_ = *std::move(started);
    return absl::OkStatus();
  }
  ~LoopServer() override {
    {
      MutexLock lock(mutex_);
      stop_ = true;
      changed_.NotifyAll();
    }
    loop_->Stop();
    if (thread_.joinable()) thread_.join();
    for (std::thread& maker : makers_) {
      if (maker.joinable()) maker.join();
    }
  }

 private:
  enum class State {
    kReading,  // its request comes
    kWaiting,  // its page is made
    kWriting,  // its answer leaves
    kEnding,   // the other end is to close; what it still says is not kept
  };
  struct Connection {
    wire::UniqueFd socket;
    uint64_t holder = 0;
    State state = State::kReading;
    Clock::time_point until;  // of the state
    std::string request;
    bool head = false;
    std::string answer;
    size_t sent = 0;
  };
  struct Order {
    uint64_t id = 0;
    std::string path;
  };

  void MakePages() {
    for (;;) {
      Order order;
      {
        MutexLock lock(mutex_);
        while (orders_.empty() && !stop_) changed_.Wait(mutex_);
        if (stop_) return;
        order = std::move(orders_.front());
        orders_.pop_front();
      }
      Answer answer = pages_.page(order.path);
      MutexLock lock(mutex_);
      made_.emplace_back(order.id, std::move(answer));
      loop_->Wake();
    }
  }

  void Accept(wire::UniqueFd socket, uint64_t holder) {
    const uint64_t id = loop_->NewId();
    const ConnectionLimits::Verdict verdict = limits_.Add(id, holder);
    if (verdict.instead.has_value()) End(*verdict.instead);
    if (!verdict.taken) return;
    if (!loop_->Watch(socket.get(), id, EPOLLIN)) return limits_.Remove(id, holder);
    Connection& connection = connections_[id];
    connection.socket = std::move(socket);
    connection.holder = holder;
    connection.until = Clock::now() + kRequestMax;
  }

  void Enter(Connection& connection, uint64_t id, State state) {
    connection.state = state;
    connection.until = Clock::now() + kPartMax;
    const uint32_t what = state == State::kWaiting   ? 0
                          : state == State::kWriting ? static_cast<uint32_t>(EPOLLOUT)
                                                     : static_cast<uint32_t>(EPOLLIN);
    // What is watched already takes no more memory.
    (void)loop_->Watch(connection.socket.get(), id, what);
  }
  void End(uint64_t id) {
    const auto found = connections_.find(id);
    if (found->second.state == State::kWaiting) {
      // Nobody makes a page for who has gone: so there are no more orders than connections.
      MutexLock lock(mutex_);
      std::erase_if(orders_, [id](const Order& order) { return order.id == id; });
    }
    limits_.Remove(id, found->second.holder);
    connections_.erase(found);
  }

  // Does for a connection what its socket is ready for.
  void Go(uint64_t id) {
    const auto found = connections_.find(id);
    if (found == connections_.end()) return;
    Connection& connection = found->second;
    bool lives = false;
    switch (connection.state) {
      case State::kReading:
        lives = Read(connection, id);
        break;
      case State::kWaiting:  // only its end is told
        break;
      case State::kWriting:
        lives = Write(connection, id);
        break;
      case State::kEnding:
        lives = ReadSome(connection) > 0;
        connection.request.clear();
        break;
    }
    if (!lives) End(id);
  }

  // As ::recv().
  static ssize_t ReadSome(Connection& connection) {
    std::array<char, 4096> some;
    const ssize_t got = ::recv(connection.socket.get(), some.data(), some.size(), 0);
    if (got > 0) connection.request.append(some.data(), static_cast<size_t>(got));
    return got;
  }
  // False: it has ended.
  bool Read(Connection& connection, uint64_t id) {
    if (ReadSome(connection) <= 0) return false;
    const size_t end = connection.request.find("\r\n\r\n");
    if (end == std::string::npos) {
      if (connection.request.size() <= kRequestBytesMax) return true;
      return Begin(connection, id, Plain(431, "the request is too long\n"));
    }
    const absl::string_view line(connection.request.data(), connection.request.find("\r\n"));
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ');
    if (words.size() != 3 || words[1].empty() || words[1].front() != '/') {
      return Begin(connection, id, Plain(400, "no request of HTTP/1.1\n"));
    }
    connection.head = words[0] == "HEAD";
    if (!connection.head && words[0] != "GET") {
      return Begin(connection, id, Plain(405, "GET and HEAD alone\n"));
    }
    std::string path(words[1].substr(0, words[1].find('?')));
    if (const std::optional<Answer> answer = pages_.at_once(path); answer.has_value()) {
      return Begin(connection, id, *answer);
    }
    Enter(connection, id, State::kWaiting);
    MutexLock lock(mutex_);
    orders_.push_back({id, std::move(path)});
    changed_.NotifyAll();
    return true;
  }
  bool Begin(Connection& connection, uint64_t id, const Answer& answer) {
    connection.answer = TextOf(answer, connection.head);
    Enter(connection, id, State::kWriting);
    return Write(connection, id);
  }
  bool Write(Connection& connection, uint64_t id) {
    while (connection.sent < connection.answer.size()) {
      const ssize_t put =
          ::send(connection.socket.get(), connection.answer.data() + connection.sent,
                 connection.answer.size() - connection.sent, MSG_NOSIGNAL);
      if (put < 0) return errno == EAGAIN || errno == EINTR;
      connection.sent += static_cast<size_t>(put);
    }
    // Closed at once, the kernel would take back what has not arrived where more was sent to us.
    ::shutdown(connection.socket.get(), SHUT_WR);
    connection.answer.clear();
    Enter(connection, id, State::kEnding);
    return true;
  }

  // Answers with the pages that were made.
  void TakeMade() {
    std::vector<std::pair<uint64_t, Answer>> made;
    {
      MutexLock lock(mutex_);
      made.swap(made_);
    }
    for (const auto& [id, answer] : made) {
      const auto found = connections_.find(id);
      if (found != connections_.end() && !Begin(found->second, id, answer)) End(id);
    }
  }

  // Returns whether connections are left, so that it must be called again.
  bool EndOverdue() {
    const Clock::time_point now = Clock::now();
    std::vector<uint64_t> overdue;
    for (const auto& [id, connection] : connections_) {
      if (connection.until <= now) overdue.push_back(id);
    }
    for (const uint64_t id : overdue) End(id);
    return !connections_.empty();
  }

  const Pages pages_;
  const wire::UniqueFd listener_;
  const std::unique_ptr<AcceptLoop> loop_;
  // ---- of the thread that has the connections ----
  ConnectionLimits limits_;
  std::map<uint64_t, Connection> connections_;

  Mutex mutex_;
  CondVar changed_;
  bool stop_ DMUOND_GUARDED_BY(mutex_) = false;
  std::deque<Order> orders_ DMUOND_GUARDED_BY(mutex_);
  std::vector<std::pair<uint64_t, Answer>> made_ DMUOND_GUARDED_BY(mutex_);

  std::array<std::thread, kThreads> makers_;
  std::thread thread_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& address,
                                                              Pages pages) {
  absl::StatusOr<TcpListener> listener = ListenTcp(address);
  if (!listener.ok()) {
    return Error(absl::StatusCode::kUnavailable, "ADDRESS_TAKEN",
                 Say("cannot listen on '", Named("address", address),
                     "' for metrics: ", listener.status().message()));
  }
  absl::StatusOr<std::unique_ptr<AcceptLoop>> loop =
      AcceptLoop::Make(address, listener->socket.get());
  if (!loop.ok()) return loop.status();
  auto server =
      std::make_unique<LoopServer>(std::move(pages), std::move(listener->socket), *std::move(loop));
  if (absl::Status started = server->Start(); !started.ok()) return started;
  return server;
}

}  // namespace dmuond::server
