#include "scheduler/membership.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/limits.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler {
namespace {

std::string NameOf(const MemberInfo& info) {
  return absl::StrCat("node ", info.node.value(), " (", info.peer_address, ")");
}

template <typename Value>
absl::Status Differs(const char* reason, const char* what, const MemberInfo& a, const Value& in_a,
                     const MemberInfo& b, const Value& in_b) {
  if (in_a == in_b) return absl::OkStatus();
  return Error(
      absl::StatusCode::kFailedPrecondition, reason,
      Say(Named("node", NameOf(a)), " has ", Named("field", what), " ", Named("value", in_a), ", ",
          Named("other_node", NameOf(b)), " has ", Named("other_value", in_b)));
}

std::string ProtocolsOf(const MemberInfo& info) {
  return absl::StrCat(info.protocol_min, " to ", info.protocol_max);
}

absl::Status CheckProtocols(const MemberInfo& a, const MemberInfo& b) {
  if (a.protocol_min <= b.protocol_max && b.protocol_min <= a.protocol_max) {
    return absl::OkStatus();
  }
  return Error(
      absl::StatusCode::kFailedPrecondition, "VERSION_MISMATCH",
      Say(Named("node", NameOf(a)), ", dmuond ", Named("version", a.version), ", speaks protocols ",
          Named("protocols", ProtocolsOf(a)), " with other daemons, ",
          Named("other_node", NameOf(b)), ", dmuond ", Named("other_version", b.version),
          ", speaks ", Named("other_protocols", ProtocolsOf(b)), ": update the older one"));
}

absl::Status CheckDevices(const MemberInfo& a, const MemberInfo& b) {
  for (const std::string& device : a.devices) {
    if (std::find(b.devices.begin(), b.devices.end(), device) == b.devices.end()) continue;
    return Error(absl::StatusCode::kAlreadyExists, "DEVICE_TWICE",
                 Say(Named("node", NameOf(a)), " and ", Named("other_node", NameOf(b)),
                     " both have lanes on device ", Named("device", device),
                     ": a device has the lane of one daemon"));
  }
  return absl::OkStatus();
}

}  // namespace

MembershipMachine::MembershipMachine(int32_t nodes, MemberInfo self, HeartbeatOptions options)
    : nodes_(nodes), self_(std::move(self)), options_(options) {
  (void)FormIfComplete();  // of one: formed() and group() tell
}

absl::Status MembershipMachine::Check(const MemberInfo& info) const {
  absl::Status status = CheckProtocols(info, self_);
  if (!status.ok()) return status;
  status = Differs("GROUP_SIZE_DIFFERS", "group size", info, info.nodes, self_, nodes_);
  if (!status.ok()) return status;
  status = Differs("DEVICE_TYPE_DIFFERS", "device type", info, info.device_type, self_,
                   self_.device_type);
  if (!status.ok()) return status;
  status = Differs("BITS_DIFFER", "hash of lane and kernels", info, info.bits.code, self_,
                   self_.bits.code);
  if (!status.ok()) return status;
  status =
      Differs("BITS_DIFFER", "core type", info, info.bits.core_type, self_, self_.bits.core_type);
  if (!status.ok()) return status;
  status =
      Differs("BITS_DIFFER", "numeric library", info, info.bits.library, self_, self_.bits.library);
  if (!status.ok()) return status;
  status = Differs("BITS_DIFFER", "digest of the C library's functions", info, info.bits.functions,
                   self_, self_.bits.functions);
  if (!status.ok()) return status;
  status = Differs("LANES_DIFFER", "number of lanes", info, info.lanes, self_, self_.lanes);
  if (!status.ok()) return status;
  status = Differs("LANE_MEMORY_DIFFERS", "memory limit per lane in bytes", info,
                   info.lane_memory_bytes, self_, self_.lane_memory_bytes);
  if (!status.ok()) return status;
  status = Differs("JOBS_MAX_DIFFERS", "--jobs_max", info, info.jobs_max, self_, self_.jobs_max);
  if (!status.ok()) return status;
  if (info.node.value() < 0 || info.node.value() >= nodes_) {
    return Error(absl::StatusCode::kInvalidArgument, "RANK_OUT_OF_RANGE",
                 Say(Named("node", NameOf(info)), " joins a group of nodes 0 to ",
                     Named("last_node", nodes_ - 1)));
  }
  if (info.node != self_.node) {
    if (status = CheckDevices(info, self_); !status.ok()) return status;
  }
  if (info.epoch.value() > kEpochMax) {
    return Error(
        absl::StatusCode::kFailedPrecondition, "EPOCH_EXHAUSTED",
        Say(Named("node", NameOf(info)), " knows of group epoch ",
            Named("epoch", info.epoch.value()), "; a group ends at ", Named("epoch_max", kEpochMax),
            ", and none comes so far: who or what has told it so?"));
  }
  return absl::OkStatus();
}

const MemberInfo& MembershipMachine::InfoOf(NodeRank node) const {
  return node == self_.node ? self_ : others_.at(node).info;
}

absl::StatusOr<std::vector<MembershipAction>> MembershipMachine::OnJoin(TimePoint now,
                                                                        const MemberInfo& info) {
  if (absl::Status status = Check(info); !status.ok()) return status;
  if (broken()) {
    return Error(absl::StatusCode::kUnavailable, "PEER_LOST",
                 Say("group epoch ", Named("epoch", epoch_.value()), " is broken: ", why_broken_));
  }
  // Members call each other, too. Ranges that overlap in pairs have a version that is in all.
  for (const auto& [node, member] : others_) {
    if (node == info.node) continue;
    if (absl::Status status = CheckProtocols(info, member.info); !status.ok()) return status;
    if (absl::Status status = CheckDevices(info, member.info); !status.ok()) return status;
  }
  const auto holder = others_.find(info.node);
  const bool held = info.node == self_.node || holder != others_.end();
  if (held) {
    const MemberInfo& first = InfoOf(info.node);
    const bool lives = info.node == self_.node || !holder->second.watch.Lost(now, options_);
    if (info.node == self_.node || (lives && first.boot_id != info.boot_id)) {
      return Error(
          absl::StatusCode::kAlreadyExists, "RANK_TWICE",
          Say("node ", Named("node", info.node.value()), " is held by the process with boot id ",
              Named("boot_id", first.boot_id), " at ", Named("address", first.peer_address),
              ", boot id ", Named("other_boot_id", info.boot_id), " at ",
              Named("other_address", info.peer_address), " cannot have it too"));
    }
    if (formed()) {
      return Lose(info.node, absl::StrCat(NameOf(info), " lost its stream and joined again"));
    }
    others_.erase(holder);
  }
  others_.emplace(info.node, Member{info, HeartbeatWatch(now)});
  return FormIfComplete();
}

void MembershipMachine::OnHeartbeat(TimePoint now, NodeRank node) {
  if (const auto member = others_.find(node); member != others_.end()) {
    member->second.watch.OnHeard(now);
  }
}

std::vector<MembershipAction> MembershipMachine::OnGone(TimePoint /*now*/, NodeRank node,
                                                        std::optional<uint64_t> boot_id) {
  const auto member = others_.find(node);
  if (member == others_.end()) return {};
  if (boot_id.has_value() && *boot_id != member->second.info.boot_id) return {};
  return Lose(node, absl::StrCat(NameOf(member->second.info), " closed its stream"));
}

std::vector<MembershipAction> MembershipMachine::OnTick(TimePoint now) {
  Actions actions;
  std::vector<NodeRank> silent;
  for (const auto& [node, member] : others_) {
    if (member.watch.Lost(now, options_)) silent.push_back(node);
  }
  for (NodeRank node : silent) {
    const Member& member = others_.at(node);
    for (MembershipAction& action :
         Lose(node, absl::StrCat("nothing heard of ", NameOf(member.info), " for ",
                                 member.watch.Silence(now).count(), " ms"))) {
      actions.push_back(std::move(action));
    }
    if (broken()) break;
  }
  if (!broken() && !others_.empty()) {
    if (const auto counter = clock_.Due(now, options_))
      actions.emplace_back(SendHeartbeat{*counter});
  }
  return actions;
}

void MembershipMachine::OnEpoch(GroupEpoch epoch) { epoch_ = std::max(epoch_, epoch); }

void MembershipMachine::StartOver() {
  state_ = State::kJoining;
  others_.clear();
  why_broken_.clear();
  (void)FormIfComplete();
}

std::vector<MembershipAction> MembershipMachine::Lose(NodeRank node, std::string detail) {
  if (broken()) return {};
  if (!formed()) {
    others_.erase(node);
    return {MemberDropped{node, std::move(detail)}};
  }
  state_ = State::kBroken;
  why_broken_ = detail;
  return {GroupBroken{epoch_, node, std::move(detail)}};
}

std::vector<MembershipAction> MembershipMachine::FormIfComplete() {
  if (state_ != State::kJoining || !missing().empty()) return {};
  epoch_ = std::max(epoch_, self_.epoch);
  for (const auto& [node, member] : others_) epoch_ = std::max(epoch_, member.info.epoch);
  epoch_ = GroupEpoch(epoch_.value() + 1);
  state_ = State::kFormed;
  return {group()};
}

GroupFormed MembershipMachine::group() const {
  GroupFormed formed{epoch_, {}};
  for (int32_t node = 0; node < nodes_; ++node) {
    formed.peer_addresses.push_back(InfoOf(NodeRank(node)).peer_address);
  }
  return formed;
}

std::vector<NodeRank> MembershipMachine::missing() const {
  std::vector<NodeRank> missing;
  for (int32_t node = 0; node < nodes_; ++node) {
    if (NodeRank(node) != self_.node && !others_.contains(NodeRank(node)))
      missing.emplace_back(node);
  }
  return missing;
}

std::map<int32_t, TimePoint> MembershipMachine::Heard() const {
  std::map<int32_t, TimePoint> heard;
  for (const auto& [node, member] : others_) heard[node.value()] = member.watch.heard();
  return heard;
}

}  // namespace dmuond::scheduler
