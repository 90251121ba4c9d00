// The attach socket (proto/dmuond/v1/attach.proto) brings the nonce and descriptors of memory, and
// shows that the daemon lives. A watcher thread notices the daemon's end and calls back, once. It
// reads nothing from the socket, so frames stay for the caller who expects them and nothing needs a
// lock.
//
// Threads: one caller; `on_lost` comes from the watcher.
#ifndef DMUOND_CLIENT_CPP_SRC_ATTACH_SOCKET_H_
#define DMUOND_CLIENT_CPP_SRC_ATTACH_SOCKET_H_

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "client/cpp/src/daemon_process.h"
#include "dmuond/v1/attach.pb.h"

namespace dmuond::client {

class AttachSocket {
 public:
  // `path` is that of the attach socket. Tries until `timeout` while there is no daemon yet.
  // UNAVAILABLE, DAEMON_UNREACHABLE, when none answers.
  static absl::StatusOr<std::unique_ptr<AttachSocket>> Connect(const std::string& path,
                                                               std::chrono::milliseconds timeout,
                                                               std::function<void()> on_lost);
  // Ends the watcher and closes the socket: to the daemon, this trainer is gone.
  ~AttachSocket();
  AttachSocket(const AttachSocket&) = delete;
  AttachSocket& operator=(const AttachSocket&) = delete;

  [[nodiscard]] const std::string& nonce() const { return nonce_; }
  [[nodiscard]] int fd() const { return socket_.get(); }

  struct Received {
    v1::AttachFrame frame;
    wire::UniqueFd fd;  // the one descriptor that came with it
  };
  // The next frame, which carries a descriptor. UNAVAILABLE when the daemon has gone.
  [[nodiscard]] absl::StatusOr<Received> NextFrame();

  // Whether the daemon has gone, or goes within `grace`.
  [[nodiscard]] bool GoneWithin(std::chrono::milliseconds grace) const;
  // Says in words, once the daemon has gone, whether it has ended or has closed the connection.
  [[nodiscard]] std::string HowItEnded() const { return daemon_.HowItEnded(); }

 private:
  AttachSocket(wire::UniqueFd socket, DaemonProcess daemon, wire::UniqueFd stop, std::string nonce,
               std::function<void()> on_lost);
  void Watch() const;

  const wire::UniqueFd socket_;
  const DaemonProcess daemon_;
  const wire::UniqueFd stop_;  // an eventfd
  const std::string nonce_;
  const std::function<void()> on_lost_;
  std::thread watcher_;
};

}  // namespace dmuond::client

#endif  // DMUOND_CLIENT_CPP_SRC_ATTACH_SOCKET_H_
