// Messages of members to the coordinator out of nowhere, and joins: a member of another build, or
// one that has gone mad, gets no answer or a refusal, and the coordinator lives.
//
// An input: messages one after another: node, two bytes of length, and so many of a MemberMessage.
// They come to a group of two that has formed and has no job yet.
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>

#include "dmuond/v1/peer.pb.h"
#include "scheduler/convert/convert.h"
#include "scheduler/job/group_job.h"
#include "scheduler/membership.h"
#include "scheduler/plan.h"
#include "server/common/log.h"
#include "tests/fuzz/reached.h"

namespace dmuond::server {
namespace {

constexpr int32_t kNodes = 2;
constexpr uint32_t kEpoch = 1;
// Stands in an input where a real member would say the digest of its plan.
constexpr uint64_t kOwnDigest = 1;

Reached reached(1000, {"plans", "attempts", "commits", "snapshots", "manifests", "rollbacks"});

class Group {
 public:
  Group() : coordinator_(Options()), members_(kNodes, Self()) {
    Hear(coordinator_.OnFormed(now_, kEpoch));
    for (int32_t node = 0; node < kNodes; ++node) {
      v1::MemberMessage message;
      message.mutable_member_state()->set_epoch(kEpoch);
      Hear(coordinator_.OnMessage(now_, node, message));
    }
  }

  void Say(int32_t node, v1::MemberMessage message) {
    if (message.has_join()) {
      (void)members_.OnJoin(now_, FromProto(message.join()));
      if (members_.broken()) members_.StartOver();
    }
    if (message.plan_ready().digest() == kOwnDigest) {
      message.mutable_plan_ready()->set_digest(digest_);
    }
    if (message.vote().plan_digest() == kOwnDigest)
      message.mutable_vote()->set_plan_digest(digest_);
    Hear(coordinator_.OnMessage(now_, node, message));
    now_ += std::chrono::milliseconds(50);
    Hear(coordinator_.OnTick(now_));
    (void)members_.OnTick(now_);
  }

  void End() { Hear(coordinator_.OnMemberGone(now_, 1, "the input has ended")); }

 private:
  static scheduler::GroupJobOptions Options() {
    scheduler::GroupJobOptions options{.nodes = kNodes, .lanes_per_node = 1, .snapshots = true};
    options.step.session_linger = std::chrono::minutes(1);
    options.snapshot.every_steps = 1;
    return options;
  }
  static scheduler::MemberInfo Self() {
    scheduler::MemberInfo self;
    self.nodes = kNodes;
    return self;
  }

  void Hear(const scheduler::GroupActions& actions) {
    for (const scheduler::Addressed& addressed : actions.messages) {
      const v1::CoordinatorMessage& message = addressed.message;
      if (message.has_plan()) Planned(message.plan());
      reached["attempts"] += message.has_open() ? 1 : 0;
      reached["commits"] += message.decision().verdict() == v1::Decision::VERDICT_COMMIT ? 1 : 0;
      reached["snapshots"] += message.has_save() ? 1 : 0;
      reached["manifests"] += message.has_write_manifest() ? 1 : 0;
      reached["rollbacks"] += message.has_roll_back() ? 1 : 0;
    }
    for (const scheduler::PlanOrder& order : actions.plans) {
      auto made = scheduler::MakePlannedJob(*order.inputs);
      Hear(coordinator_.OnPlanMade(now_, order, std::move(made)));
    }
  }

  void Planned(const v1::PlanInputs& plan) {
    const auto inputs = FromProto(plan);
    const auto made = inputs.ok() ? scheduler::MakePlan(*inputs) : inputs.status();
    if (!made.ok()) std::abort();  // members must be able to make what they are sent
    ++reached["plans"];
    digest_ = made->digest;
  }

  scheduler::TimePoint now_;
  scheduler::GroupJob coordinator_;
  scheduler::MembershipMachine members_;
  uint64_t digest_ = 0;
};

void Run(const std::string& input) {
  reached.NextInput();
  Group group;
  for (size_t at = 0; at + 3 <= input.size();) {
    const int32_t node = static_cast<uint8_t>(input[at]) % kNodes;
    const size_t length =
        static_cast<uint8_t>(input[at + 1]) + (size_t{static_cast<uint8_t>(input[at + 2])} << 8);
    v1::MemberMessage message;
    if (message.ParseFromString(input.substr(at + 3, length))) group.Say(node, std::move(message));
    at += 3 + length;
  }
  group.End();
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
