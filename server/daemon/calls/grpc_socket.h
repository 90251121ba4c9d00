// A listening socket of a gRPC server whose connections this process accepts itself. So it knows
// who is at the other end of each, and limits how many connections a user, or an address of the
// network, has, and for how long a connection may prove nothing. Where connections come from other
// machines, they are proven before gRPC reads a byte of theirs.
//
//   auto socket = GrpcSocket::Make(*Listen({.path = …}), {.name = …});  // before the server
//   … BuildAndStart() a server without a port of its own …
//   (*socket)->Serve(*server);
//   … in a handler: (*socket)->CallerOf(*context); MakeKnown(*context) when it has proven itself
//   (*socket)->Stop();                                  // then the server's Shutdown()
//
// Threads: all methods from any. One thread of its own accepts and watches; `prove` has one for
// each connection that is being proven.
#ifndef DMUOND_SERVER_DAEMON_CALLS_GRPC_SOCKET_H_
#define DMUOND_SERVER_DAEMON_CALLS_GRPC_SOCKET_H_

#include <grpcpp/grpcpp.h>
#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/mutex.h"
#include "base/unique_fd.h"
#include "server/common/log.h"
#include "server/common/seldom.h"
#include "server/daemon/calls/accept_loop.h"
#include "server/daemon/calls/connection_limits.h"
#include "server/daemon/calls/proof_threads.h"
#include "server/daemon/calls/session_keys.h"
#include "server/daemon/calls/unix_listener.h"

namespace dmuond::server {

class GrpcSocket {
 public:
  // What has been proven of a connection.
  struct Proven {
    wire::UniqueFd socket;  // for gRPC, non-blocking: the same one, or another that stands for it
    int32_t node = -1;      // that has connected
  };
  struct Options {
    std::string name;  // of the listener, for the log: its path, or host:port
    // Users whose connections are accepted; unset: all that may open the file.
    std::optional<std::vector<uid_t>> allowed_uids;
    ConnectionLimits::Limits limits;
    // A connection that is still a stranger's after this time is closed; unset: never.
    std::optional<std::chrono::milliseconds> strange_for;
    // Of a TCP listener: whether a connection is for gRPC at all. It may block, for a bounded time,
    // and must return when the connection is shut down.
    std::function<absl::StatusOr<Proven>(wire::UniqueFd)> prove;
    size_t per_second = 0;  // connections of an address in a second; with `prove`
  };
  // Connections wait until Serve().
  static absl::StatusOr<std::unique_ptr<GrpcSocket>> Make(ListeningSocket listener,
                                                          Options options);
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
  // Who has connected, before anything is proven.
  struct Origin {
    uint64_t holder = 0;  // for the limits
    Caller caller;
    std::vector<log::Field> fields;  // for the log
  };
  struct Connection {
    uint64_t id = 0;
    uint64_t holder = 0;
    Caller caller;
    int number = -1;  // of gRPC's descriptor, which it names the peer by; numbers are used again
    wire::UniqueFd held;  // a duplicate, by which its end is seen, and it can be ended
    bool known = false;
    std::chrono::steady_clock::time_point since;
  };
  GrpcSocket(ListeningSocket listener, Options options, std::unique_ptr<AcceptLoop> loop);

  [[nodiscard]] Origin OriginOf(int socket, const sockaddr_storage& from) const;
  void Take(wire::UniqueFd socket, const Origin& origin);
  // Why it is refused; empty: it is counted.
  absl::string_view Count(uint64_t id, int socket, const Origin& origin) DMUOND_REQUIRES(mutex_);
  void Prove(uint64_t id, wire::UniqueFd socket, const Origin& origin);
  void OnReady(uint64_t id);
  void Refuse(absl::string_view why, const Origin& origin) DMUOND_REQUIRES(mutex_);
  void GiveToGrpc(Connection& connection, int number) DMUOND_REQUIRES(mutex_);
  // Returns whether strangers are left, so that it must be called again.
  bool DropStrangers();
  void Remove(uint64_t id) DMUOND_REQUIRES(mutex_);
  void End(uint64_t id) DMUOND_REQUIRES(mutex_);
  Connection* Find(const grpc::ServerContext& context) DMUOND_REQUIRES(mutex_);

  const Options options_;
  ListeningSocket listener_;
  const std::unique_ptr<AcceptLoop> loop_;
  grpc::Server* server_ = nullptr;
  ConnectionRate rate_;  // the thread's own

  Mutex mutex_;
  Seldom refusals_ DMUOND_GUARDED_BY(mutex_);
  bool stop_ DMUOND_GUARDED_BY(mutex_) = false;
  ConnectionLimits limits_ DMUOND_GUARDED_BY(mutex_);
  std::map<uint64_t, Connection> connections_ DMUOND_GUARDED_BY(mutex_);
  std::map<int, uint64_t> by_number_ DMUOND_GUARDED_BY(mutex_);  // the newest of each number

  ProofThreads proofs_;
  std::thread thread_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_GRPC_SOCKET_H_
