// A Unix socket of a gRPC server whose connections this process accepts itself. So it knows who is
// at the other end of each, and limits how many connections a user has and for how long a
// connection may prove nothing.
//
//   auto socket = GrpcSocket::Listen({.path = …});      // before the server: the path is taken
//   … BuildAndStart() a server without a port of its own …
//   (*socket)->Serve(*server);
//   … in a handler: (*socket)->CallerOf(*context); MakeKnown(*context) when it has proven itself
//   (*socket)->Stop();                                  // then the server's Shutdown()
//
// Threads: all methods from any. One thread of its own accepts and watches.
#ifndef DMUOND_SERVER_DAEMON_CALLS_GRPC_SOCKET_H_
#define DMUOND_SERVER_DAEMON_CALLS_GRPC_SOCKET_H_

#include <grpcpp/grpcpp.h>
#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "dmuond/wire/unique_fd.h"
#include "kernels/mutex.h"
#include "server/common/seldom.h"
#include "server/daemon/calls/connection_limits.h"
#include "server/daemon/calls/session_keys.h"
#include "server/daemon/calls/unix_listener.h"

namespace dmuond::server {

class GrpcSocket {
 public:
  struct Options {
    std::string path;            // nothing may lie there
    mode_t mode = 0600;          // 0600 or 0660
    std::optional<gid_t> group;  // of the socket file; unset: the process's
    // Users whose connections are accepted; unset: all that may open the file.
    std::optional<std::vector<uid_t>> allowed_uids;
    ConnectionLimits::Limits limits;
    // A connection that is still a stranger's after this time is closed; unset: never.
    std::optional<std::chrono::milliseconds> strange_for;
  };
  // Connections wait until Serve(). The error names the path.
  static absl::StatusOr<std::unique_ptr<GrpcSocket>> Listen(Options options);
  ~GrpcSocket();  // as Stop()
  GrpcSocket(const GrpcSocket&) = delete;
  GrpcSocket& operator=(const GrpcSocket&) = delete;

  // Once. The server must live until Stop().
  void Serve(grpc::Server& server);
  // Accepts no more connections and removes its file, not that of another process at the path. Open
  // connections stay with the server.
  void Stop();

  // Unset: the call's connection has ended.
  [[nodiscard]] std::optional<Caller> CallerOf(const grpc::ServerContext& context);
  void MakeKnown(const grpc::ServerContext& context);

 private:
  struct Connection {
    uint64_t id = 0;
    Caller caller;
    int number = -1;  // of gRPC's descriptor, which it names the peer by; numbers are used again
    wire::UniqueFd held;  // a duplicate, by which its end is seen, and it can be ended
    bool known = false;
    std::chrono::steady_clock::time_point since;
  };
  GrpcSocket(Options options, ListeningSocket listener, wire::UniqueFd wake, wire::UniqueFd events);

  void Run();
  void AcceptAll();
  void Take(wire::UniqueFd socket);
  void DropStrangers();
  void Remove(uint64_t id) DMUOND_REQUIRES(mutex_);
  void End(uint64_t id) DMUOND_REQUIRES(mutex_);
  Connection* Find(const grpc::ServerContext& context) DMUOND_REQUIRES(mutex_);

  const Options options_;
  ListeningSocket listener_;
  const wire::UniqueFd wake_;    // an eventfd
  const wire::UniqueFd events_;  // an epoll descriptor
  grpc::Server* server_ = nullptr;
  std::chrono::steady_clock::time_point accept_again_{};  // the thread's own
  bool accepting_ = false;                                // the thread's own
  Seldom refusals_;                                       // the thread's own

  Mutex mutex_;
  bool stop_ DMUOND_GUARDED_BY(mutex_) = false;
  uint64_t next_id_ DMUOND_GUARDED_BY(mutex_) = 2;  // after those of listener_ and wake_
  ConnectionLimits limits_ DMUOND_GUARDED_BY(mutex_);
  std::map<uint64_t, Connection> connections_ DMUOND_GUARDED_BY(mutex_);
  std::map<int, uint64_t> by_number_ DMUOND_GUARDED_BY(mutex_);  // the newest of each number

  std::thread thread_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_GRPC_SOCKET_H_
