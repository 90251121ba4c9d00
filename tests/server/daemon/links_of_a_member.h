// A daemon's links to others that only listen. Threads: any.
#ifndef DMUOND_TESTS_SERVER_DAEMON_LINKS_OF_A_MEMBER_H_
#define DMUOND_TESTS_SERVER_DAEMON_LINKS_OF_A_MEMBER_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <stop_token>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/v1/peer.pb.h"
#include "server/daemon/daemon.h"
#include "tests/server/daemon/support.h"

namespace dmuond::server {

class LinksOfAMember final : public PeerLinks {
 public:
  GroupGaps Gaps() override { return {}; }
  std::map<int32_t, std::chrono::steady_clock::time_point> Heard() override { return {}; }
  std::optional<absl::Time> CertificatesExpire() override { return std::nullopt; }
  void SendToMembers(std::optional<int32_t> /*node*/,
                     const v1::CoordinatorMessage& message) override {
    if (said_to_members_) said_to_members_(message);
  }
  void SendToCoordinator(const v1::MemberMessage& message) override {
    if (told_coordinator_) told_coordinator_(message);
    told_.Put(message);
  }
  // Each is called as the message leaves, under the daemon's lock. Before anything is sent.
  void Watch(std::function<void(const v1::MemberMessage&)> told_coordinator,
             std::function<void(const v1::CoordinatorMessage&)> said_to_members) {
    told_coordinator_ = std::move(told_coordinator);
    said_to_members_ = std::move(said_to_members);
  }
  absl::StatusOr<StateTensor> ReadState(int32_t /*node*/, const v1::ReadStateRequest& /*request*/,
                                        size_t elements) override {
    return StateTensor(elements);
  }
  absl::Status WriteState(int32_t /*node*/, const v1::WriteStateRequest& /*request*/) override {
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<v1::LaneTrace>> TraceNode(int32_t /*node*/,
                                                       const v1::TraceNodeRequest& /*request*/,
                                                       const std::stop_token& /*stop*/) override {
    return std::vector<v1::LaneTrace>();
  }
  absl::StatusOr<ClockAhead> ReadClock(int32_t /*node*/) override { return ClockAhead(); }

  // What the coordinator is told next; nothing: it does not come within `patience`.
  std::optional<v1::MemberMessage> Take(std::chrono::milliseconds patience) {
    return told_.Take(patience);
  }
  // The same of one kind; what comes before it is dropped.
  std::optional<v1::MemberMessage> Next(bool (v1::MemberMessage::*of_kind)() const) {
    for (;;) {
      std::optional<v1::MemberMessage> told = told_.Take();
      if (!told.has_value() || ((*told).*of_kind)()) return told;
    }
  }

 private:
  Inbox<v1::MemberMessage> told_;
  std::function<void(const v1::MemberMessage&)> told_coordinator_;
  std::function<void(const v1::CoordinatorMessage&)> said_to_members_;
};

}  // namespace dmuond::server

#endif  // DMUOND_TESTS_SERVER_DAEMON_LINKS_OF_A_MEMBER_H_
