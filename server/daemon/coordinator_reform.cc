// The coordinator of a job whose lanes or members were lost: who goes on from where.
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/daemon/coordinator.h"
#include "server/daemon/log.h"

namespace dmuond::server {
namespace {

using scheduler::OutcomeReason;
using scheduler::TimePoint;

// A step in which lanes die this often without it, or a push, committing does not go on for ever.
constexpr int32_t kLaneDeathsMax = 3;

}  // namespace

AddressedMessages Coordinator::OnLaneLost(TimePoint now, const v1::LaneLost& lost) {
  const std::string detail = absl::StrCat("lane ", lost.lane(), " ended: ", lost.detail());
  if (job_ == nullptr || job_->steps == nullptr || job_->steps->lost()) {
    return Lost(now, OutcomeReason::kLaneLost, detail);
  }
  // Of lanes that have been given up since.
  if (lost.epoch() != epoch_) return {};
  // A broken group forms with new lanes anyway.
  if (states_.size() < static_cast<size_t>(options_.nodes)) return {};
  const scheduler::StepId step = job_->steps->Current().step;
  job_->deaths = job_->deaths_in == step ? job_->deaths + 1 : 1;
  job_->deaths_in = step;
  if (job_->deaths >= kLaneDeathsMax) {
    job_->interruption.reset();
    return Lost(now, OutcomeReason::kLaneLost,
                absl::StrCat(detail, "; lanes have died ", job_->deaths, " times before step ",
                             step.value(), " came to its end"));
  }
  job_->interruption = Interruption{OutcomeReason::kLaneLost, detail};
  ++epoch_;
  attempts_ = 0;
  for (auto& [node, state] : states_) state.set_epoch(epoch_);
  return Reform();
}

AddressedMessages Coordinator::Reform() {
  job_->steps->Suspend();
  job_->ready.clear();
  job_->blobs.clear();
  AddressedMessages out;
  v1::Reform& reform = *out.emplace_back().message.mutable_reform();
  reform.set_epoch(epoch_);
  reform.set_why(job_->interruption->detail);
  return out;
}

AddressedMessages Coordinator::OnMemberState(TimePoint now, int32_t from,
                                             const v1::MemberState& state) {
  if (state.epoch() < epoch_) return {};
  states_[from] = state;
  if (states_.size() < static_cast<size_t>(options_.nodes)) return {};
  for (const auto& [node, told] : states_) {
    if (told.epoch() != epoch_) return {};  // ahead of our own news
  }
  AddressedMessages out = GoOn();
  for (const auto& [node, message] : std::exchange(early_, {})) {
    AddressedMessages more = OnMessage(now, node, message);
    std::move(more.begin(), more.end(), std::back_inserter(out));
  }
  return out;
}

AddressedMessages Coordinator::GoOn() {
  if (job_ != nullptr && job_->steps != nullptr && job_->steps->lost()) {
    return EndJob("the group formed anew after the job was lost", "PEER_LOST");
  }
  const v1::MemberState* holder = nullptr;  // a node that has the job
  int32_t without = 0;                      // one that has lost the job's memory
  bool everywhere = job_ != nullptr && job_->steps != nullptr;
  bool has_state = false;
  for (const auto& [node, state] : states_) {
    if (!state.job().empty() && (holder == nullptr || state.has_state())) holder = &state;
    has_state = has_state || state.has_state();
    const bool same = everywhere && state.job() == job_->name && state.has_memory() &&
                      state.job_incarnation() == job_->incarnation;
    if (same) continue;
    everywhere = false;
    without = node;
  }
  if (everywhere) {
    if (!job_->interruption.has_value()) {
      job_->interruption = Interruption{OutcomeReason::kPeerLost, "the group formed anew"};
    }
    return Reform();
  }
  // A job that registers is nobody's yet but its trainers'.
  if (holder == nullptr) return {};
  const std::string detail =
      has_state ? absl::StrCat("the daemon of node ", without,
                               " began anew: the state that it owned is lost with its predecessor")
                : absl::StrCat("the daemon of node ", without,
                               " began anew before the job had any state: start the job again");
  v1::CoordinatorMessage message;
  v1::JobEnded& ended = *message.mutable_job_ended();
  ended.set_job(holder->job());
  ended.set_why(detail);
  ended.set_reason(has_state ? "STATE_LOST" : "PEER_LOST");
  job_.reset();
  AddressedMessages out;
  for (const auto& [node, state] : states_) {
    if (state.job() == ended.job()) out.push_back({node, message});
  }
  return out;
}

}  // namespace dmuond::server
