// What a session does when the job goes back to a step, or its daemon has gone: it takes its place
// in the job again, and tells the caller where to go on.
#include <algorithm>
#include <iostream>
#include <map>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/status_macros.h"
#include "client/cpp/src/session_impl.h"
#include "client/cpp/src/status.h"

namespace dmuond::client {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

constexpr Milliseconds kFirstPause{50};
constexpr Milliseconds kLongestPause{1000};
// The end of the attach socket may follow an answer that it explains.
constexpr Milliseconds kGlance{1000};
// A group that has not noticed the old session's end calls the rank taken.
constexpr std::chrono::seconds kTakenFor{30};

std::string Known(const std::optional<int64_t>& durable_step) {
  return durable_step.has_value() ? absl::StrCat("step ", *durable_step) : "none is known";
}

double Seconds(Milliseconds time) { return static_cast<double>(time.count()) / 1000; }

bool NothingLeft(const absl::Status& status) {
  const std::string reason = ReasonOf(status);
  return reason == "JOB_HAS_NO_STATE" || reason == kStateLost;
}

// Whether a later try may succeed: the successor is starting, the group forming, other ranks are on
// their way.
bool Passes(const absl::Status& status, Clock::duration tried) {
  if (NothingLeft(status)) return false;
  if (absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ||
      absl::IsCancelled(status)) {
    return true;
  }
  const std::string reason = ReasonOf(status);
  // The session ended between two calls: the job began again meanwhile.
  if (reason == "INCARNATION_OLD") return true;
  return reason == "RANK_TWICE" && tried < kTakenFor;
}

}  // namespace

absl::StatusOr<Outcome> Session::Impl::Settle(absl::StatusOr<Outcome> outcome) {
  carried_on_ = false;
  if (outcome.ok()) return outcome;
  absl::Status status = Settle(outcome.status());
  if (carried_on_) return Outcome{};
  if (ReasonOf(status) != kRolledBack) return status;
  return Outcome{.kind = Outcome::Kind::kRolledBack,
                 .step = last_committed_step_ + 1,
                 .attempt = next_attempt_ - 1,
                 .detail = std::string(status.message()),
                 .next_attempt = next_attempt_,
                 .durable_step = durable_step_,
                 .to_step = last_committed_step_,
                 .trainer_state = trainer_state_,
                 .fresh_memory = MetadataOf(status)["fresh_memory"] == "true"};
}

absl::Status Session::Impl::Settle(absl::Status status) {
  carried_on_ = false;
  // The caller has heard since that something is amiss, and may have looked where things lie now.
  if (!going_back_.ok()) stands_at_.reset();
  const uint64_t arrived_before = arrived_attempt_;
  for (;;) {
    const std::string reason = ReasonOf(status);
    if (reason == kRolledBack) {
      std::map<std::string, std::string> told = MetadataOf(status);
      int64_t to_step = 0;
      uint32_t epoch = 0;
      if (!absl::SimpleAtoi(told["to_step"], &to_step) ||
          !absl::SimpleAtoi(told["epoch"], &epoch)) {
        return status;
      }
      if (epoch != 0 && told["cause"] != kPeerLost) stands_at_.reset();  // somebody asked for it
      // Where the way back fails, the next call goes on with it.
      going_back_ = status;
      status = epoch == 0 ? absl::OkStatus() : Acknowledge(to_step, epoch);
    } else if (IsTheEnd(status)) {
      RETURN_IF_ERROR(ComeBack(status));
      status = absl::OkStatus();
    } else {
      return status;
    }
    undecided_ = false;
    if (status.ok()) status = TryWaitPublished(PublishedWithin());
    if (!status.ok()) continue;
    ASSIGN_OR_RETURN(bool carried, CarryOn(arrived_before));
    going_back_ = absl::OkStatus();
    const bool moved = std::exchange(moved_, false);
    carried_on_ = carried;
    if (carried_on_) return absl::OkStatus();
    notice_.reset();
    state_known_ = true;
    stands_at_ = last_committed_step_;
    return WentBack(last_committed_step_, moved);
  }
}

absl::StatusOr<bool> Session::Impl::CarryOn(uint64_t arrived_before) {
  if (stands_at_ != last_committed_step_) return false;
  if (moved_) {
    RETURN_IF_ERROR(link_->memory().TakeOver(shown_->memory()));
    Say(absl::StrCat("rank ", options_.rank, " goes on after step ", last_committed_step_,
                     " with the daemon's successor; nothing is lost"));
  }
  // Weights that the caller has written since, to push them, are not there any more.
  arrived_attempt_ = arrived_before;
  return true;
}

void Session::Impl::Say(const std::string& what) const {
  if (what.empty()) return;
  if (options_.log) {
    options_.log(what);
  } else {
    std::cerr << "dmuond: " << what << std::endl;
  }
}

bool Session::Impl::IsTheEnd(const absl::Status& status) {
  const std::string reason = ReasonOf(status);
  if (reason == kDaemonLost) return true;
  if (reason == "DRAINING") {  // it finishes what it has begun, and leaves
    return in_job_ && link_->LostWithin(options_.reconnect_timeout);
  }
  if (reason == "INCARNATION_OLD") return link_->LostWithin(kGlance);
  // Other reasons are the daemon's own words; without one a connection broke.
  return !status.ok() && reason.empty() && link_->lost();
}

absl::Status Session::Impl::Acknowledge(int64_t to_step, uint32_t epoch) {
  v1::AckRollbackRequest request;
  *request.mutable_key() = link_->Key();
  request.set_to_step(to_step);
  request.set_epoch(epoch);
  v1::AckRollbackReply reply;
  if (link_->LostWithin(Milliseconds(0))) return DaemonLost("AckRollback", link_->HowItEnded());
  fault::FaultPoint("trainer.rolled_back");
  // Answers when the other ranks have read of it, too.
  RETURN_IF_ERROR(
      link_->channel().Call("AckRollback", &v1::Trainer::Stub::AckRollback, request, reply, {}));
  next_attempt_ = reply.next_attempt();
  published_attempt_ = reply.next_attempt() - 1;
  last_committed_step_ = to_step;
  if (durable_step_.has_value()) durable_step_ = std::min(*durable_step_, to_step);
  trainer_state_ = reply.trainer_state();
  going_back_ = RolledBack(last_committed_step_, 0, /*asked=*/false);
  fault::FaultPoint("trainer.acknowledged");
  return absl::OkStatus();
}

bool Session::Impl::IsLeaving(const absl::Status& status) const {
  return ReasonOf(status) == "DRAINING" && options_.reconnect_timeout.count() > 0;
}

absl::Status Session::Impl::BeginAgain() {
  const Milliseconds most = options_.reconnect_timeout;
  Say(absl::StrCat("rank ", options_.rank, ": the daemon at ", path_, " is leaving; waiting up to ",
                   Seconds(most), " s for its successor"));
  const Clock::time_point until = Clock::now() + most;
  absl::Status status = absl::DeadlineExceededError("it has not ended");
  if (link_->LostWithin(most)) {
    const auto left = std::chrono::ceil<Milliseconds>(until - Clock::now());
    status = OpenWithin(std::max(left, Milliseconds(0)));
  }
  const bool nobody = absl::IsDeadlineExceeded(status) || ReasonOf(status) == kDaemonUnreachable;
  if (!nobody) return status;
  return MakeError(absl::StatusCode::kUnavailable, kDaemonLost,
                   absl::StrCat("the daemon at ", path_, " was leaving when rank ", options_.rank,
                                " came, and no successor took over within ", Seconds(most), " s (",
                                status.message(), ")"));
}

absl::Status Session::Impl::ComeBack(const absl::Status& why) {
  if (!in_job_ || options_.reconnect_timeout.count() <= 0) return why;
  Say(absl::StrCat("rank ", options_.rank, ": ", link_->HowItEnded(), ", at ", path_,
                   ", after step ", last_committed_step_,
                   " (newest snapshot: ", Known(durable_step_), "); waiting up to ",
                   Seconds(options_.reconnect_timeout), " s for its successor"));
  link_->GiveUp();
  const Clock::time_point started = Clock::now();
  Milliseconds pause = kFirstPause;
  for (;;) {
    absl::Status status = TryComeBack();
    if (status.ok()) return status;
    const Clock::duration tried = Clock::now() - started;
    if (!Passes(status, tried) || tried + pause > options_.reconnect_timeout) {
      return NotBack(status);
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

absl::Status Session::Impl::TryComeBack() {
  ASSIGN_OR_RETURN(std::unique_ptr<Link> link, Link::Connect(path_, Milliseconds(0), SilentFor()));
  fault::FaultPoint("trainer.returning");
  absl::Status status = link->Open(options_, Resume::kRequire);
  if (!status.ok()) return status;
  ASSIGN_OR_RETURN(Registered registered, link->Register(*layout_));
  ASSIGN_OR_RETURN(v1::AttachBuffersReply attached, link->Attach());
  if (!attached.published()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "JOB_HAS_NO_STATE",
                     "the successor has begun the job anew");
  }
  if (!moved_) shown_ = link_.get();
  stale_.push_back(std::exchange(link_, std::move(link)));
  if (registered.parameter_bucket != registered_.parameter_bucket) {
    stands_at_.reset();  // the caller's buckets are others now
  }
  registered_ = std::move(registered);
  moved_ = true;
  AdoptOpened();
  AdoptAttached(attached);
  going_back_ = RolledBack(last_committed_step_, 0, /*asked=*/false);
  fault::FaultPoint("trainer.returned");
  return absl::OkStatus();
}

absl::Status Session::Impl::NotBack(const absl::Status& last) {
  if (NothingLeft(last)) {
    return StateLost(absl::StrCat("the job's state is lost after step ", last_committed_step_,
                                  " (newest snapshot: ", Known(durable_step_),
                                  "): ", last.message()));
  }
  if (!Passes(last, Clock::duration::zero())) return last;
  return MakeError(
      absl::StatusCode::kUnavailable, kDaemonLost,
      absl::StrCat("the daemon at ", path_, " has gone, and no successor took over within ",
                   Seconds(options_.reconnect_timeout), " s (", last.message(),
                   "); the weights in the arenas are undefined. Last committed step ",
                   last_committed_step_, ", newest snapshot: ", Known(durable_step_)));
}

}  // namespace dmuond::client
