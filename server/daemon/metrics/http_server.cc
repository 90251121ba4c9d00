#include "server/daemon/metrics/http_server.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

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
#include "dmuond/wire/start_thread.h"
#include "dmuond/wire/unique_fd.h"
#include "kernels/mutex.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/daemon/calls/connection_limits.h"
#include "server/daemon/calls/tcp_listener.h"

namespace dmuond::server {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kThreads = 4;                     // that make pages
constexpr std::chrono::seconds kRequestMax{2};  // what a request may take to come
constexpr std::chrono::seconds kPartMax{5};     // to be answered, and its answer to leave, each
constexpr std::chrono::milliseconds kLook{100};
constexpr std::chrono::milliseconds kAcceptPause{100};
constexpr int kAcceptedAtOnce = 64;  // before other events are looked at
constexpr size_t kRequestBytesMax = 8192;
// All are strangers to the end: none proves anything.
constexpr ConnectionLimits::Limits kLimits = {.all = HttpServer::kConnectionsMax,
                                              .per_holder = 64,
                                              .strangers_per_holder = 32,
                                              .strangers = 64};

constexpr uint64_t kListener = 0;
constexpr uint64_t kWake = 1;
constexpr uint64_t kFirstConnection = 2;

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

class EpollServer final : public HttpServer {
 public:
  EpollServer(Pages pages, wire::UniqueFd listener, wire::UniqueFd wake, wire::UniqueFd events)
      : pages_(std::move(pages)),
        listener_(std::move(listener)),
        wake_(std::move(wake)),
        events_(std::move(events)),
        limits_(kLimits) {}
  // RESOURCE_EXHAUSTED: it has not the threads that it needs.
  absl::Status Start() {
    for (std::thread& maker : makers_) {
      absl::StatusOr<std::thread> started =
          wire::StartThread("pages of --metrics_address", [this] { MakePages(); });
      if (!started.ok()) return started.status();
      maker = *std::move(started);
    }
    absl::StatusOr<std::thread> started = wire::StartThread("--metrics_address", [this] { Run(); });
    if (!started.ok()) return started.status();
    thread_ = *std::move(started);
    return absl::OkStatus();
  }
  ~EpollServer() override {
    {
      MutexLock lock(mutex_);
      stop_ = true;
      changed_.NotifyAll();
    }
    Wake();
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

  void Wake() {
    const uint64_t one = 1;
    // Fails only when the counter is full, and then the thread wakes anyway.
    [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
  }

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
      Wake();
    }
  }

  void Run() {
    std::array<epoll_event, 64> ready;
    for (;;) {
      const Clock::time_point now = Clock::now();
      if (!accepting_ && now >= accept_again_) {
        accepting_ = Watch(listener_.get(), kListener, EPOLLIN, EPOLL_CTL_ADD);
      }
      const bool idle = connections_.empty() && accepting_;
      const int count = ::epoll_wait(events_.get(), ready.data(), static_cast<int>(ready.size()),
                                     idle ? -1 : static_cast<int>(kLook.count()));
      for (int i = 0; i < count; ++i) {
        const uint64_t id = ready[i].data.u64;
        if (id == kListener) {
          AcceptSome();
        } else if (id == kWake) {
          if (!TakeMade()) return;
        } else {
          Go(id);
        }
      }
      EndOverdue();
    }
  }

  bool Watch(int fd, uint64_t id, uint32_t what, int how) {
    epoll_event event{};
    event.events = what;
    event.data.u64 = id;
    return ::epoll_ctl(events_.get(), how, fd, &event) == 0;
  }

  void AcceptSome() {
    for (int i = 0; i < kAcceptedAtOnce; ++i) {
      sockaddr_storage from{};
      socklen_t size = sizeof(from);
      wire::UniqueFd socket(::accept4(listener_.get(), reinterpret_cast<sockaddr*>(&from), &size,
                                      SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket.valid()) {
        if (errno == EINTR || errno == ECONNABORTED) continue;
        if (errno == EAGAIN) return;
        // No descriptor is left. The listener stays readable meanwhile.
        ::epoll_ctl(events_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
        accepting_ = false;
        accept_again_ = Clock::now() + kAcceptPause;
        return;
      }
      const uint64_t id = next_id_++;
      const uint64_t holder = HolderOf(from);
      const ConnectionLimits::Verdict verdict = limits_.Add(id, holder);
      if (verdict.instead.has_value()) End(*verdict.instead);
      if (!verdict.taken) continue;
      if (!Watch(socket.get(), id, EPOLLIN, EPOLL_CTL_ADD)) {
        limits_.Remove(id, holder);
        continue;
      }
      Connection& connection = connections_[id];
      connection.socket = std::move(socket);
      connection.holder = holder;
      connection.until = Clock::now() + kRequestMax;
    }
  }

  void Enter(Connection& connection, uint64_t id, State state) {
    connection.state = state;
    connection.until = Clock::now() + kPartMax;
    const uint32_t what = state == State::kWaiting   ? 0
                          : state == State::kWriting ? static_cast<uint32_t>(EPOLLOUT)
                                                     : static_cast<uint32_t>(EPOLLIN);
    Watch(connection.socket.get(), id, what, EPOLL_CTL_MOD);
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

  // Answers with the pages that were made. False: the server is to end.
  bool TakeMade() {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t read = ::read(wake_.get(), &count, sizeof(count));
    std::vector<std::pair<uint64_t, Answer>> made;
    {
      MutexLock lock(mutex_);
      if (stop_) return false;
      made.swap(made_);
    }
    for (const auto& [id, answer] : made) {
      const auto found = connections_.find(id);
      if (found != connections_.end() && !Begin(found->second, id, answer)) End(id);
    }
    return true;
  }

  void EndOverdue() {
    const Clock::time_point now = Clock::now();
    std::vector<uint64_t> overdue;
    for (const auto& [id, connection] : connections_) {
      if (connection.until <= now) overdue.push_back(id);
    }
    for (const uint64_t id : overdue) End(id);
  }

  const Pages pages_;
  const wire::UniqueFd listener_;
  const wire::UniqueFd wake_;    // an eventfd
  const wire::UniqueFd events_;  // an epoll descriptor
  // ---- of the thread that has the connections ----
  bool accepting_ = false;
  Clock::time_point accept_again_{};
  uint64_t next_id_ = kFirstConnection;
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
  wire::UniqueFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  wire::UniqueFd events(::epoll_create1(EPOLL_CLOEXEC));
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWake;
  if (!wake.valid() || !events.valid() ||
      ::epoll_ctl(events.get(), EPOLL_CTL_ADD, wake.get(), &event) != 0) {
    return absl::ErrnoToStatus(errno, "eventfd or epoll");
  }
  auto server = std::make_unique<EpollServer>(std::move(pages), std::move(listener->socket),
                                              std::move(wake), std::move(events));
  if (absl::Status started = server->Start(); !started.ok()) return started;
  return server;
}

}  // namespace dmuond::server
