// The lanes of one rail, one on each node, that send each other memory: gloo_group where it is the
// host's, nccl_group where it is a GPU's.
//
// A group is made once and never repaired: when a peer is gone it fails, the lane ends, and the
// next group epoch has new lanes with new groups.
#ifndef DMUOND_SERVER_LANE_PEER_GROUP_H_
#define DMUOND_SERVER_LANE_PEER_GROUP_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device.h"

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
  // the groups of equal `tag`; each tag is in use by one group at a time. Any two members start the
  // groups in which they have messages for each other in the same order. Memory must stay until
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
  // INTERNAL: a peer has started something else than this member.
  [[nodiscard]] virtual absl::StatusOr<bool> Done(int64_t ticket) = 0;

  // Whether something is under way whose end `notify` does not tell: Ready() or Done() is to be
  // asked again, which also starts what waits here for its turn.
  [[nodiscard]] virtual bool needs_polls() const { return false; }

  // Whether bytes cross while something is under way. It looks: call it now and then.
  struct Silence {
    std::chrono::milliseconds lasts{0};  // no byte has crossed for so long; 0: all is well
    std::string connections;             // for people
  };
  // Always 0 where a library alone knows what crosses, as for GPUs.
  [[nodiscard]] virtual Silence silence() { return {}; }

  // Ends what is under way, here at once and at the peers as they notice: every later call is
  // ABORTED, but Done() of what was through. Memory is free when the object is gone.
  virtual void Abort() = 0;
};

// What a member's end of a group is made of.
struct PeerGroupSetup {
  int rank = 0;
  int size = 0;              // at least 2
  std::string bind_address;  // a name or number of this host; empty: loopback
  // A member whose machine acknowledges nothing for so long is gone; 0: when the kernel gives it
  // up, some 15 minutes. A library's connections are its own, and not looked at.
  std::chrono::milliseconds silence_max{0};
  // Where the memory lies, and a stream for messages alone; both outlive the group. A group over
  // the host's memory needs neither.
  kernels::Device* device = nullptr;
  kernels::Stream* stream = nullptr;
  // Called from any thread when something that the group was asked for may be done.
  std::function<void()> notify;
};
// May take a second: it loads and asks libraries.
using PeerGroupFactory =
    std::function<absl::StatusOr<std::unique_ptr<PeerGroup>>(PeerGroupSetup setup)>;

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_PEER_GROUP_H_
