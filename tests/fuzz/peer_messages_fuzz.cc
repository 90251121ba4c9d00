// Messages of members to the coordinator out of nowhere, and joins: a member of another build, or
// one that has gone mad, gets no answer or a refusal, and the coordinator lives.
//
// An input: messages one after another: node, two bytes of length, and so many of a MemberMessage.
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "dmuond/v1/peer.pb.h"
#include "scheduler/membership.h"
#include "server/convert.h"
#include "server/daemon/coordinator.h"
#include "server/daemon/log.h"

namespace dmuond::server {
namespace {

constexpr int32_t kNodes = 2;

void Run(const std::string& input) {
  scheduler::TimePoint now;
  Coordinator coordinator({.nodes = kNodes, .lanes_per_node = 1});
  scheduler::MemberInfo self;
  self.nodes = kNodes;
  scheduler::MembershipMachine group(kNodes, self);
  (void)coordinator.OnFormed(now, 1);
  for (size_t at = 0; at + 3 <= input.size();) {
    const int32_t node = static_cast<uint8_t>(input[at]) % kNodes;
    const size_t length =
        static_cast<uint8_t>(input[at + 1]) + (size_t{static_cast<uint8_t>(input[at + 2])} << 8);
    v1::MemberMessage message;
    if (message.ParseFromString(input.substr(at + 3, length))) {
      if (message.has_join()) {
        (void)group.OnJoin(now, FromProto(message.join()));
        if (group.broken()) group.StartOver();
      }
      (void)coordinator.OnMessage(now, node, message);
    }
    at += 3 + length;
    now += std::chrono::milliseconds(50);
    (void)coordinator.OnTick(now);
    (void)group.OnTick(now);
  }
  (void)coordinator.OnMemberGone(now, 1, "the input has ended");
}

}  // namespace
}  // namespace dmuond::server

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  namespace log = dmuond::server::log;
  static const bool quiet = [] {
    log::SetLevel(log::Level::kError);
    return true;
  }();
  (void)quiet;
  dmuond::server::Run(std::string(reinterpret_cast<const char*>(data), size));
  return 0;
}
