// The coordinator of a job whose lanes or members were lost: who goes on from where.
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

AddressedMessages Coordinator::OnMemberState(int32_t from, const v1::MemberState& state) {
  if (state.epoch() < epoch_) return {};
  states_[from] = state;
  if (states_.size() < static_cast<size_t>(options_.nodes)) return {};
  for (const auto& [node, told] : states_) {
    if (told.epoch() != epoch_) return {};  // ahead of our own news
  }
  return GoOn();
}

AddressedMessages Coordinator::GoOn() {
  if (job_ != nullptr && job_->steps != nullptr && job_->steps->lost()) {
    return EndJob("the group formed anew after the job was lost", "PEER_LOST");
  }
  const v1::MemberState* holder = nullptr;  // anybody with state
  int32_t without = -1;                     // a node that has lost the job's memory
  for (const auto& [node, state] : states_) {
    if (state.has_state()) holder = &state;
    const bool same = job_ != nullptr && state.job() == job_->name && state.has_memory() &&
                      job_->inputs != nullptr && state.job_incarnation() == job_->incarnation;
    if (!same) without = node;
  }
  if (job_ != nullptr && job_->steps != nullptr && without < 0) {
    if (!job_->interruption.has_value()) {
      job_->interruption = Interruption{OutcomeReason::kPeerLost, "the group formed anew"};
    }
    return Reform();
  }
  if (holder == nullptr && (job_ == nullptr || job_->steps == nullptr)) return {};
  const std::string detail =
      absl::StrCat("the daemon of node ", without,
                   " began anew: the state that it owned is lost with its predecessor");
  AddressedMessages out;
  v1::JobEnded& ended = *out.emplace_back().message.mutable_job_ended();
  ended.set_job(holder != nullptr ? holder->job() : job_->name);
  ended.set_why(detail);
  ended.set_reason("STATE_LOST");
  job_.reset();
  return out;
}

}  // namespace dmuond::server
