// Who belongs to the group: exactly `nodes` daemons, never fewer, so there is no quorum and no
// split brain. The machine lives beside the step coordinator, in node 0's daemon, which is a member
// of itself. A group is joining, then formed with a new epoch, then broken as soon as one member is
// lost. Pure: time is passed in, what it wants done is returned.
//
//   MembershipMachine group(nodes, self);
//   auto actions = group.OnJoin(now, info);   // a member's stream opens; not OK: refuse it
#ifndef DMUOND_SCHEDULER_MEMBERSHIP_H_
#define DMUOND_SCHEDULER_MEMBERSHIP_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "scheduler/heartbeat.h"
#include "scheduler/types.h"

namespace dmuond::scheduler {

// What decides, beside the plan, which bits a daemon's lanes compute.
struct LaneBits {
  std::string code;       // hash of lane and kernels
  std::string library;    // of matrix products, with versions
  std::string core_type;  // the library's kernels that run
  std::string functions;  // digest of what the C library's return
};

// What a daemon says of itself when it joins.
struct MemberInfo {
  NodeRank node;
  int32_t nodes = 1;  // group size that it was started with
  int32_t lanes = 1;
  std::string version;        // build, for people
  uint32_t protocol_min = 0;  // oldest that it speaks with other daemons
  uint32_t protocol_max = 0;  // newest
  std::string device_type;    // "cpu", "cuda"
  // Uuids of its lanes' GPUs. Daemons of one host that see each other give none away twice; those
  // in containers may not.
  std::vector<std::string> devices;
  LaneBits bits;
  std::string peer_address;  // host:port
  GroupEpoch epoch;          // newest that it knows; 0: none
  uint64_t boot_id = 0;      // random per process
  int64_t lane_memory_bytes = 0;
  int32_t jobs_max = 1;  // places for jobs
};

// To every member.
struct GroupFormed {
  GroupEpoch epoch;
  std::vector<std::string> peer_addresses;  // by node
};
struct GroupBroken {
  GroupEpoch epoch;
  NodeRank lost;
  std::string detail;
};
struct SendHeartbeat {
  uint64_t counter = 0;
};
// A member was lost before the group was complete: its stream is to be closed.
struct MemberDropped {
  NodeRank node;
  std::string detail;
};
using MembershipAction = std::variant<GroupFormed, GroupBroken, SendHeartbeat, MemberDropped>;

class MembershipMachine {
 public:
  // A group of one is formed from the start. REQUIRES: self.nodes == nodes >= 1, self.node < nodes.
  MembershipMachine(int32_t nodes, MemberInfo self, HeartbeatOptions options = {});

  // The error with which OnJoin() would refuse such a member whoever else has joined; else OK.
  [[nodiscard]] absl::Status Check(const MemberInfo& info) const;
  // Refused, naming both members and both values, with nothing changed (reasons in brackets):
  // FAILED_PRECONDITION for no protocol in common [VERSION_MISMATCH], another group size
  // [GROUP_SIZE_DIFFERS], device type [DEVICE_TYPE_DIFFERS], lanes that would compute other bits
  // [BITS_DIFFER], number of lanes [LANES_DIFFER], memory per lane [LANE_MEMORY_DIFFERS] or number
  // of jobs [JOBS_MAX_DIFFERS], and for an epoch beyond kEpochMax [EPOCH_EXHAUSTED];
  // INVALID_ARGUMENT for a node outside the group [RANK_OUT_OF_RANGE]; ALREADY_EXISTS for a node
  // that another living process holds [RANK_TWICE], and for a GPU that another member has
  // [DEVICE_TWICE]; UNAVAILABLE when the group is broken [PEER_LOST]. A member that joins again
  // while the group is formed has lost messages with its old stream: it breaks the group.
  [[nodiscard]] absl::StatusOr<std::vector<MembershipAction>> OnJoin(TimePoint now,
                                                                     const MemberInfo& info);
  // A member has sent a message, of whatever kind: it lives.
  void OnHeartbeat(TimePoint now, NodeRank node);
  // The stream of a member has ended. With `boot_id` only that process is meant: nothing happens if
  // its successor has joined since.
  [[nodiscard]] std::vector<MembershipAction> OnGone(TimePoint now, NodeRank node,
                                                     std::optional<uint64_t> boot_id = {});
  // Call at least every 100 ms: sends heartbeats, notices silence.
  [[nodiscard]] std::vector<MembershipAction> OnTick(TimePoint now);
  // The group has begun `epoch` without anybody joining, because lanes died, say: the next one will
  // be larger.
  void OnEpoch(GroupEpoch epoch);
  // After a break: everyone but this daemon must join anew, for a larger epoch.
  void StartOver();

  [[nodiscard]] bool formed() const { return state_ == State::kFormed; }
  [[nodiscard]] bool broken() const { return state_ == State::kBroken; }
  [[nodiscard]] GroupEpoch epoch() const { return epoch_; }  // newest formed; 0: none yet
  [[nodiscard]] GroupFormed group() const;                   // REQUIRES: formed()
  [[nodiscard]] std::vector<NodeRank> missing() const;       // have not joined
  // When each other member was heard of last.
  [[nodiscard]] std::map<int32_t, TimePoint> Heard() const;

 private:
  enum class State : uint8_t { kJoining, kFormed, kBroken };
  struct Member {
    MemberInfo info;
    HeartbeatWatch watch;
  };
  using Actions = std::vector<MembershipAction>;

  [[nodiscard]] const MemberInfo& InfoOf(NodeRank node) const;
  [[nodiscard]] Actions FormIfComplete();
  [[nodiscard]] Actions Lose(NodeRank node, std::string detail);

  const int32_t nodes_;
  const MemberInfo self_;
  const HeartbeatOptions options_;
  State state_ = State::kJoining;
  GroupEpoch epoch_;
  std::map<NodeRank, Member> others_;
  HeartbeatClock clock_;
  std::string why_broken_;
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_MEMBERSHIP_H_
