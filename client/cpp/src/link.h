// What ties a session to one daemon process: attach socket, calls, shared memory. It ends with that
// process; a session that outlives its daemon makes another link to the next one.
//
// Threads: one caller; `lost` and the memory's Poison() come from the watcher.
#ifndef DMUOND_CLIENT_CPP_SRC_LINK_H_
#define DMUOND_CLIENT_CPP_SRC_LINK_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/src/attach_socket.h"
#include "client/cpp/src/channel.h"
#include "client/cpp/src/session_memory.h"
#include "dmuond/client/layout.h"
#include "dmuond/client/options.h"
#include "dmuond/v1/trainer.pb.h"

namespace dmuond::client {

class Link {
 public:
  // DAEMON_UNREACHABLE when nobody answers within `timeout`. For `silent_for` see Channel.
  static absl::StatusOr<std::unique_ptr<Link>> Connect(const std::string& path,
                                                       std::chrono::milliseconds timeout,
                                                       std::chrono::milliseconds silent_for);
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  // In this order.
  absl::Status Open(const Options& options, Resume resume);
  absl::StatusOr<Registered> Register(const Layout& layout);
  // And maps the layout's arenas.
  absl::StatusOr<v1::AttachBuffersReply> Attach(const FirstWeights& first = {});

  // To the daemon, this trainer is gone. What is mapped stays mapped.
  void Disconnect();
  // The same, from a daemon that is of no use any more: lost() from now on.
  void GiveUp() {
    lost_.store(true);
    memory_.Poison();
    how_it_ended_ = HowItEnded();
    Disconnect();
  }

  [[nodiscard]] bool lost() const { return lost_.load(); }
  // Whether the daemon has gone, or goes within `grace`.
  [[nodiscard]] bool LostWithin(std::chrono::milliseconds grace);
  // For people, once it has gone: whether it has ended or has closed the connection.
  [[nodiscard]] std::string HowItEnded() const {
    return attach_ != nullptr ? attach_->HowItEnded() : how_it_ended_;
  }

  [[nodiscard]] const v1::HelloReply& hello() const { return hello_; }
  [[nodiscard]] const v1::OpenSessionReply& opened() const { return opened_; }
  [[nodiscard]] v1::SessionKey Key() const;
  [[nodiscard]] SessionMemory& memory() { return memory_; }
  [[nodiscard]] const SessionMemory& memory() const { return memory_; }
  // REQUIRES: not disconnected.
  [[nodiscard]] Channel& channel() { return *channel_; }

 private:
  Link() = default;

  std::atomic<bool> lost_{false};
  std::string path_;
  v1::HelloReply hello_;
  v1::OpenSessionReply opened_;
  int64_t refusals_ = 0;  // of registrations, as far as this end has read them
  SessionMemory memory_;
  std::string how_it_ended_;  // when it was disconnected
  std::unique_ptr<Channel> channel_;
  // Last: its watcher must end before what it touches.
  std::unique_ptr<AttachSocket> attach_;
};

}  // namespace dmuond::client

#endif  // DMUOND_CLIENT_CPP_SRC_LINK_H_
