#include "tests/client/socket_relay.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

namespace dmuond::testing {
namespace {

void Require(bool holds, const char* what) {
  if (holds) return;
  std::perror(what);
  std::abort();
}

sockaddr_un Address(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  Require(path.size() < sizeof(address.sun_path), "socket path");
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

// False: the end has closed, or the other does not take it.
bool Move(int from, int to) {
  std::array<char, 64 << 10> bytes;
  const ssize_t size = ::recv(from, bytes.data(), bytes.size(), MSG_DONTWAIT);
  if (size <= 0) return false;
  ssize_t sent = 0;
  while (sent < size) {
    const ssize_t n = ::send(to, bytes.data() + sent, size - sent, MSG_NOSIGNAL);
    if (n <= 0) return false;
    sent += n;
  }
  return true;
}

}  // namespace

SocketRelay::SocketRelay(const std::string& path, std::string target, const std::string& daemon)
    : target_(std::move(target)),
      listener_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  const sockaddr_un address = Address(path);
  Require(
      ::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0,
      "bind");
  Require(::listen(listener_.get(), 64) == 0, "listen");
  Require(::symlink((daemon + ".attach").c_str(), (path + ".attach").c_str()) == 0, "symlink");
  thread_ = std::thread([this] { Run(); });
}

SocketRelay::~SocketRelay() {
  {
    MutexLock lock(mutex_);
    stop_ = true;
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
  thread_.join();
}

void SocketRelay::Cut() {
  {
    MutexLock lock(mutex_);
    for (const Pair& pair : pairs_) {
      ::shutdown(pair.client.get(), SHUT_RDWR);
      ::shutdown(pair.server.get(), SHUT_RDWR);
    }
  }
  // The thread sees their end and forgets them.
}

void SocketRelay::Accept() {
  wire::UniqueFd client(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  wire::UniqueFd server(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_un address = Address(target_);
  if (!client.valid() ||
      ::connect(server.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return;
  }
  pairs_.push_back({std::move(client), std::move(server)});
}

void SocketRelay::Run() {
  for (;;) {
    std::vector<pollfd> polled = {{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    {
      MutexLock lock(mutex_);
      if (stop_) return;
      for (const Pair& pair : pairs_) {
        polled.push_back({pair.client.get(), POLLIN, 0});
        polled.push_back({pair.server.get(), POLLIN, 0});
      }
    }
    if (::poll(polled.data(), polled.size(), -1) < 0) continue;
    MutexLock lock(mutex_);
    size_t at = 2;  // only this thread adds and removes pairs
    for (auto pair = pairs_.begin(); pair != pairs_.end(); at += 2) {
      const int client = pair->client.get();
      const int server = pair->server.get();
      const bool lives = (polled[at].revents == 0 || Move(client, server)) &&
                         (polled[at + 1].revents == 0 || Move(server, client));
      pair = lives ? std::next(pair) : pairs_.erase(pair);
    }
    if (polled[1].revents != 0) Accept();
  }
}

}  // namespace dmuond::testing
