// A Unix socket that passes bytes on to another one, and whose connections can be cut at any moment
// while the two ends live on. The attach socket beside it is the daemon's own, by a symbolic link:
// who a trainer is, and that it lives, is not tampered with.
//
// Threads: Cut() from any; one thread of its own moves the bytes.
#ifndef DMUOND_TESTS_CLIENT_SOCKET_RELAY_H_
#define DMUOND_TESTS_CLIENT_SOCKET_RELAY_H_

#include <list>
#include <string>
#include <thread>

#include "base/mutex.h"
#include "base/unique_fd.h"

namespace dmuond::testing {

class SocketRelay {
 public:
  // Listens at `path` and connects to `target` for each who comes. The attach socket of `path` is
  // that of `daemon`. Dies (CHECK) where it cannot: a test without it proves nothing.
  SocketRelay(const std::string& path, std::string target, const std::string& daemon);
  ~SocketRelay();
  SocketRelay(const SocketRelay&) = delete;
  SocketRelay& operator=(const SocketRelay&) = delete;

  // Ends all connections, with whatever is under way.
  void Cut();

 private:
  // Bytes read from one end that the other has not taken yet: written at once, blocking.
  struct Pair {
    wire::UniqueFd client;
    wire::UniqueFd server;
  };
  void Run();
  void Accept() DMUOND_REQUIRES(mutex_);

  const std::string target_;
  wire::UniqueFd listener_;
  wire::UniqueFd wake_;  // an eventfd
  Mutex mutex_;
  bool stop_ DMUOND_GUARDED_BY(mutex_) = false;
  std::list<Pair> pairs_ DMUOND_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_CLIENT_SOCKET_RELAY_H_
