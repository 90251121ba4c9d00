// The lanes of one rail, one on each node, that send each other memory. Two implementations are
// meant: gloo_group (host memory) and NCCL (device memory).
//
// A group is made once and never repaired: when a peer is gone it fails, the lane ends, and the
// next group epoch has new lanes with new groups.
#ifndef DMUOND_SERVER_LANE_PEER_GROUP_H_
#define DMUOND_SERVER_LANE_PEER_GROUP_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace dmuond::server::lane {

// Threads: the lane's dispatching thread. No call blocks. Everything under way ends when the
// process does.
class PeerGroup {
 public:
  virtual ~PeerGroup() = default;

  // What the other members must know to connect to this one. The daemons exchange it.
  [[nodiscard]] virtual const std::string& blob() const = 0;
  // Starts connecting. `blobs`: those of all members, by rank.
  virtual absl::Status Connect(const std::vector<std::string>& blobs) = 0;
  // Whether all members are connected. ABORTED: they will never be.
  [[nodiscard]] virtual absl::StatusOr<bool> Ready() = 0;

  struct Message {
    bool send = false;  // otherwise: receive
    int peer = 0;       // rank in the group
    std::byte* data = nullptr;
    size_t bytes = 0;
  };
  // Starts a group of messages. Messages from one member to another pair up in their order within
  // the groups of equal `tag`; each tag is in use by one group at a time. Memory must stay until
  // Done().
  virtual absl::StatusOr<int64_t> Start(uint64_t tag, std::span<const Message> messages) = 0;
  // Starts adding up all members' values, `in.size()` of them everywhere, into `out` at `root`;
  // empty elsewhere. Gives up the promise of the same bits for any cut of the job: the order of
  // addition is the implementation's (Gloo: by rank). `in` and `out` may be the same memory. Tags
  // and memory as for Start().
  virtual absl::StatusOr<int64_t> Reduce(uint64_t tag, std::span<const float> in,
                                         std::span<float> out, int root) = 0;
  // Starts copying root's bytes to all other members.
  virtual absl::StatusOr<int64_t> Broadcast(uint64_t tag, std::span<std::byte> data, int root) = 0;
  // Whether everything of what was started has arrived and been sent. ABORTED: a peer is gone.
  [[nodiscard]] virtual absl::StatusOr<bool> Done(int64_t ticket) = 0;

  // Ends what is under way, here at once and at the peers as they notice: every later call is
  // ABORTED, but Done() of what was through. Memory is free when the object is gone.
  virtual void Abort() = 0;
};

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_PEER_GROUP_H_
