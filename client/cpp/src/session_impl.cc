#include "client/cpp/src/session_impl.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/status_macros.h"
#include "client/cpp/src/convert.h"
#include "client/cpp/src/launch.h"
#include "client/cpp/src/status.h"

namespace dmuond::client {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kTrainerStateBytesMax = size_t{1} << 20;
// Of one call; longer waits are several calls.
constexpr std::chrono::milliseconds kCallWaitMax{10'000};
// What a call may take beyond its own wait before it counts as lost.
constexpr std::chrono::milliseconds kCallSlack{60'000};
// Weights that are late may not come at all: the daemon is asked this often.
constexpr std::chrono::milliseconds kAskEvery{1000};
// A device that fails tells nobody: while a call of its trainer waits, it is asked this often.
constexpr std::chrono::milliseconds kDeviceCheckEvery{500};
// A start that is slower than the daemon's --claim_timeout connects again: so often at least, and
// as long as it may wait for a daemon.
constexpr int kClaimsMin = 3;
// Of a daemon that does not say how long weights may take.
constexpr std::chrono::minutes kPublishedWithin{10};

}  // namespace

absl::Status Session::Impl::CheckOpen(const char* call) const {
  if (closed_) return WrongState(absl::StrCat(call, ": the session is closed"));
  // The socket knows before the watcher's thread has run; the channel would find a successor, which
  // is to hear of this session only when it has come back.
  if (link_->LostWithin(Milliseconds(0))) return DaemonLost(call, link_->HowItEnded());
  return going_back_;
}

absl::Status Session::Impl::CheckAttached(const char* call) const {
  if (closed_) return WrongState(absl::StrCat(call, ": the session is closed"));
  if (!link_->memory().complete()) {
    return link_->lost() ? DaemonLost(call, link_->HowItEnded())
                         : WrongState(absl::StrCat(call, " comes after Attach"));
  }
  return absl::OkStatus();
}

absl::Status Session::Impl::CheckSubmit(const SubmitOptions& options) const {
  if (options.trainer_state.size() > kTrainerStateBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("trainer_state has ",
                                                   options.trainer_state.size(), " bytes, at most ",
                                                   kTrainerStateBytesMax, " are possible"));
  }
  const SessionMemory& memory = link_->memory();
  const size_t parameters = memory.layout().parameters.size();
  // A call that is made again finds its buckets marked by the first one, which told lanes before.
  const bool again = submit_request_.attempt() == next_attempt_ &&
                     std::ranges::equal(submit_request_.absent(), options.absent);
  for (const int32_t parameter : options.absent) {
    if (parameter < 0 || static_cast<size_t>(parameter) >= parameters) {
      return absl::InvalidArgumentError(
          absl::StrCat("absent parameter ", parameter, " of ", parameters));
    }
    const int32_t bucket = memory.bucket_of(parameter);
    if (bucket >= 0 && memory.IsMarked(bucket, next_attempt_) && !options.withdraw && !again) {
      return absl::InvalidArgumentError(absl::StrCat(
          "absent names parameter ", parameter, ", but its bucket ", bucket,
          " has been marked ready for this step, and lanes may have read it: withdraw, or leave "
          "buckets with gradients that may be absent to Submit"));
    }
  }
  if (!options.not_finite.has_value()) return absl::OkStatus();
  if (*options.not_finite < 0 || static_cast<size_t>(*options.not_finite) >= parameters) {
    return absl::InvalidArgumentError(
        absl::StrCat("not_finite names parameter ", *options.not_finite, " of ", parameters));
  }
  if ((link_->hello().features() & v1::FEATURE_NOT_FINITE) == 0) {
    return MakeError(absl::StatusCode::kFailedPrecondition, kVersionMismatch,
                     absl::StrCat("the gradient of parameter ", *options.not_finite,
                                  " is not finite on this rank, and ", link_->hello().server(),
                                  " is too old to skip the step for it: update the daemon"));
  }
  return absl::OkStatus();
}

absl::Status Session::Impl::Open(const std::string& path) {
  RETURN_IF_ERROR(CheckLaunch(options_));
  path_ = path;
  return OpenWithin(options_.connect_timeout);
}

absl::Status Session::Impl::OpenWithin(Milliseconds connect_timeout) {
  const Clock::time_point give_up = Clock::now() + connect_timeout;
  for (int tries = 1;; ++tries) {
    const auto left = std::chrono::ceil<Milliseconds>(give_up - Clock::now());
    ASSIGN_OR_RETURN(link_, Link::Connect(path_, std::max(left, Milliseconds(0)), SilentFor()));
    absl::Status status = link_->Open(options_, options_.resume);
    const bool late = ReasonOf(status) == kClaimExpired;
    if (late && (tries < kClaimsMin || Clock::now() < give_up)) continue;
    if (status.ok()) AdoptOpened();
    return IsLeaving(status) ? BeginAgain() : status;
  }
}

void Session::Impl::AdoptOpened() {
  const v1::OpenSessionReply& opened = link_->opened();
  last_committed_step_ = opened.last_committed_step();
  trainer_state_ = opened.trainer_state();
  durable_step_.reset();
  if (opened.has_durable_step()) durable_step_ = opened.durable_step();
  *submit_request_.mutable_key() = link_->Key();
  *wait_request_.mutable_key() = link_->Key();
}

void Session::Impl::AdoptAttached(const v1::AttachBuffersReply& attached) {
  next_attempt_ = attached.next_attempt();
  published_attempt_ = std::max<uint64_t>(2, next_attempt_) - 1;
  last_committed_step_ = attached.last_committed_step();
  trainer_state_ = attached.trainer_state();
  if (durable_step_.has_value()) durable_step_ = std::min(*durable_step_, last_committed_step_);
}

absl::StatusOr<Registered> Session::Impl::Register(const Layout& layout) {
  absl::Status status = CheckOpen("Register");
  if (!status.ok()) return status;
  if (layout_.has_value()) return WrongState("Register: the session has a layout already");
  for (const Fragment& fragment : layout.fragments) {
    if (fragment.parameter < 0 ||
        static_cast<size_t>(fragment.parameter) >= layout.parameters.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "a fragment names parameter ", fragment.parameter, " of ", layout.parameters.size()));
    }
  }
  absl::StatusOr<Registered> registered = link_->Register(layout);
  while (IsLeaving(registered.status())) {
    RETURN_IF_ERROR(BeginAgain());
    registered = link_->Register(layout);
  }
  if (!registered.ok()) return registered;
  layout_ = layout;
  registered_ = *registered;
  return registered;
}

absl::Status Session::Impl::Attach(const FirstWeights& first) {
  absl::Status status = CheckOpen("Attach");
  if (!status.ok()) return status;
  if (!layout_.has_value()) return WrongState("Attach comes after Register");
  if (link_->memory().complete()) return WrongState("Attach: the buffers are attached already");
  ASSIGN_OR_RETURN(v1::AttachBuffersReply reply, link_->Attach(first));
  next_attempt_ = reply.next_attempt();
  if (!reply.published()) return absl::OkStatus();
  in_job_ = true;
  AdoptAttached(reply);
  status = Settle(TryWaitPublished(PublishedWithin()));
  // A caller who has seen none of the job's steps has nothing to go back from.
  return ReasonOf(status) == kRolledBack ? absl::OkStatus() : status;
}

absl::Status Session::Impl::MarkReady(int32_t bucket, SessionMemory::Stream stream) {
  // On the way back nothing is marked: the caller will come with other gradients.
  if (!link_->memory().complete() || !going_back_.ok()) return absl::OkStatus();
  absl::Status marked = link_->memory().MarkReady(bucket, next_attempt_, stream);
  fault::FaultPoint("trainer.signalled_early");
  return marked;
}

void Session::Impl::HoldBack(const std::vector<int32_t>& absent) {
  held_back_.assign(link_->memory().buckets(), 0);
  hold_none_.assign(link_->memory().buckets(), 0);
  for (const int32_t parameter : absent) {
    const int32_t bucket = link_->memory().bucket_of(parameter);
    if (bucket >= 0) held_back_[bucket] = 1;
  }
}

// A daemon that is stopped is waited for as long as one that has to be started again.
auto Session::Impl::SilentFor() const -> Milliseconds {
  return kCallSlack + options_.reconnect_timeout;
}

absl::Status Session::Impl::CallPatiently(const std::function<absl::Status()>& call) {
  const Clock::time_point give_up = Clock::now() + SilentFor();
  for (;;) {
    absl::Status status = call();
    const bool silent = absl::IsDeadlineExceeded(status) && ReasonOf(status).empty();
    if (!silent || Clock::now() > give_up) return status;
  }
}

absl::StatusOr<Outcome> Session::Impl::TrySubmit(const StepScalars& scalars,
                                                 const SubmitOptions& options) {
  absl::Status status = CheckOpen("Submit");
  if (!status.ok()) return status;
  SessionMemory& memory = link_->memory();
  HoldBack(options.absent);
  const Clock::time_point deadline = Clock::now() + options.wait;
  const uint64_t attempt = next_attempt_;
  // Lanes learn of absent gradients by the submit: buckets with one are marked after it.
  const bool marks_later = !options.absent.empty() && !options.withdraw;
  fault::FaultPoint("trainer.gradients");
  if (!options.withdraw) status = memory.MarkAllReady(held_back_, attempt, options.stream);
  fault::FaultPoint("trainer.signalled");
  if (status.ok()) status = memory.MarkSubmitted(attempt, options.stream);
  if (!status.ok()) return status;
  fault::FaultPoint("trainer.marked");

  if (!notice_.has_value() || notice_->step() != last_committed_step_ + 1) {
    notice_.emplace(options_.rank, last_committed_step_ + 1);
  }
  const Milliseconds wait =
      marks_later ? Milliseconds(0) : std::min(options.wait, LongestWaitOfACall());
  submit_request_.set_step(last_committed_step_ + 1);
  submit_request_.set_attempt(attempt);
  ToProto(scalars, *submit_request_.mutable_scalars());
  submit_request_.mutable_absent()->Assign(options.absent.begin(), options.absent.end());
  submit_request_.set_withdraw(options.withdraw);
  submit_request_.clear_not_finite();
  if (options.not_finite.has_value()) submit_request_.set_not_finite(*options.not_finite);
  submit_request_.set_trainer_state(options.trainer_state);
  submit_request_.set_wait_ms(static_cast<int32_t>(wait.count()));
  submitted_state_ = options.trainer_state;
  status = CallPatiently([&] {
    return link_->channel().Call("SubmitStep", &v1::Trainer::Stub::SubmitStep, submit_request_,
                                 submit_reply_, {.timeout = wait + kCallSlack});
  });
  if (!status.ok()) return Refused(std::move(status));
  if (marks_later) status = memory.MarkAllReady(hold_none_, attempt, options.stream);
  if (!status.ok()) return status;
  undecided_ = true;
  fault::FaultPoint("trainer.submitted");
  if (submit_reply_.outcome().kind() != v1::Outcome::KIND_UNSPECIFIED) {
    return Answered(submit_reply_.outcome(), submit_reply_.timing());
  }
  const auto left = std::chrono::duration_cast<Milliseconds>(deadline - Clock::now());
  if (left.count() <= 0) return Outcome{.step = last_committed_step_ + 1, .attempt = attempt};
  return TryWait(left);
}

absl::StatusOr<Outcome> Session::Impl::TryWait(Milliseconds wait) {
  const Clock::time_point deadline = Clock::now() + wait;
  wait_request_.set_step(last_committed_step_ + 1);
  wait_request_.set_attempt(next_attempt_);
  for (;;) {
    absl::Status status = CheckOpen("Wait");
    if (status.ok()) status = link_->memory().CheckDevice();
    if (!status.ok()) return status;
    const auto left = std::chrono::ceil<Milliseconds>(deadline - Clock::now());
    const Milliseconds once = std::clamp(left, Milliseconds(0), LongestWaitOfACall());
    wait_request_.set_wait_ms(static_cast<int32_t>(once.count()));
    status = CallPatiently([&] {
      return link_->channel().Call("WaitStep", &v1::Trainer::Stub::WaitStep, wait_request_,
                                   wait_reply_, {.timeout = once + kCallSlack});
    });
    if (!status.ok()) return Refused(std::move(status));
    if (wait_reply_.outcome().kind() != v1::Outcome::KIND_UNSPECIFIED) {
      return Answered(wait_reply_.outcome(), wait_reply_.timing());
    }
    if (notice_.has_value()) Say(notice_->Hear(wait_reply_));
    if (Clock::now() >= deadline) {
      return Outcome{.step = wait_request_.step(), .attempt = next_attempt_};
    }
  }
}

auto Session::Impl::LongestWaitOfACall() const -> Milliseconds {
  Milliseconds longest = link_->memory().by_streams() ? kDeviceCheckEvery : kCallWaitMax;
  if (notice_.has_value()) longest = std::min(longest, notice_->Left());
  return longest;
}

absl::StatusOr<Outcome> Session::Impl::Answered(const v1::Outcome& message,
                                                const v1::StepTiming& timing) {
  Outcome outcome = FromProto(message);
  undecided_ = false;
  fault::FaultPoint("trainer.decided");
  timing_ = FromProto(timing);
  if (outcome.durable_step.has_value()) durable_step_ = outcome.durable_step;
  if (outcome.kind == Outcome::Kind::kRolledBack) {
    return RolledBack(outcome.to_step, message.epoch(),
                      outcome.reason != Outcome::Reason::kPeerLost);
  }
  next_attempt_ = outcome.next_attempt;
  if (outcome.kind == Outcome::Kind::kCommitted || outcome.kind == Outcome::Kind::kSkipped) {
    if (notice_.has_value()) Say(notice_->End());
    notice_.reset();
    state_known_ = true;
    stands_at_.reset();  // until the weights have arrived
    last_committed_step_ = outcome.step;
    published_attempt_ = outcome.attempt;
    trainer_state_.swap(submitted_state_);
  }
  return outcome;
}

absl::StatusOr<Outcome> Session::Impl::Refused(absl::Status status) {
  undecided_ = false;
  const uint64_t attempt = next_attempt_;
  Follow(status);
  // It ended unheard, between two steps say, and the step is still the open one.
  if (ReasonOf(status) == "ATTEMPT_OUT_OF_ORDER" && next_attempt_ > attempt) {
    return Outcome{.kind = Outcome::Kind::kAborted,
                   .step = last_committed_step_ + 1,
                   .attempt = attempt,
                   .detail = std::string(status.message()),
                   .retry = true,
                   .next_attempt = next_attempt_,
                   .durable_step = durable_step_};
  }
  return status;
}

void Session::Impl::Follow(const absl::Status& status) {
  const auto metadata = MetadataOf(status);
  const auto next = metadata.find("next_attempt");
  uint64_t attempt = 0;
  if (next != metadata.end() && absl::SimpleAtoi(next->second, &attempt)) next_attempt_ = attempt;
}

absl::StatusOr<Outcome> Session::Impl::TryStep(const StepScalars& scalars,
                                               const SubmitOptions& options) {
  absl::StatusOr<Outcome> outcome = TrySubmit(scalars, options);
  // The gradients are those of the first try; what was withdrawn is marked anew.
  while (outcome.ok() && outcome->kind == Outcome::Kind::kAborted && outcome->retry) {
    SubmitOptions again = options;
    again.withdraw = false;
    outcome = TrySubmit(scalars, again);
  }
  if (!outcome.ok() || outcome->kind == Outcome::Kind::kPending) return outcome;
  if (outcome->kind == Outcome::Kind::kAborted) return Aborted(*outcome);
  RETURN_IF_ERROR(TryWaitPublished(PublishedWithin()));
  return outcome;
}

// By then the daemon has replaced whoever hangs, or ended the job.
auto Session::Impl::PublishedWithin() const -> Milliseconds {
  const Milliseconds told(link_->opened().published_timeout_ms());
  return told.count() > 0 ? told : Milliseconds(kPublishedWithin);
}

absl::Status Session::Impl::TryWaitPublished(Milliseconds timeout) {
  const Clock::time_point deadline = Clock::now() + timeout;
  for (;;) {
    const Clock::time_point ask = std::min(deadline, Clock::now() + kAskEvery);
    const auto published = link_->memory().WaitPublished(published_attempt_, ask);
    if (published == SessionMemory::Published::kYes) {
      arrived_attempt_ = link_->memory().ArrivedAttempts().oldest;
      if (state_known_ && going_back_.ok()) stands_at_ = last_committed_step_;
      fault::FaultPoint("trainer.published");
      return absl::OkStatus();
    }
    RETURN_IF_ERROR(link_->memory().CheckDevice());
    if (!link_->LostWithin(Milliseconds(0))) {
      RETURN_IF_ERROR(AskWhy(published == SessionMemory::Published::kPoisoned));
    }
    if (published == SessionMemory::Published::kPoisoned) {
      return DaemonLost(absl::StrCat("waiting for the weights after step ", last_committed_step_),
                        link_->HowItEnded());
    }
    if (Clock::now() < deadline) continue;
    return MakeError(
        absl::StatusCode::kDeadlineExceeded, "NOT_PUBLISHED",
        absl::StrCat("the weights after step ", last_committed_step_, " (attempt ",
                     published_attempt_, ") are not published after ", timeout.count(), " ms"));
  }
}

absl::Status Session::Impl::AskWhy(bool poisoned) {
  wait_request_.set_step(last_committed_step_ + 1);
  wait_request_.set_attempt(next_attempt_);
  wait_request_.set_wait_ms(0);
  absl::Status status = link_->channel().Call("WaitStep", &v1::Trainer::Stub::WaitStep,
                                              wait_request_, wait_reply_, {.timeout = kCallSlack});
  const std::string reason = ReasonOf(status);
  // Nothing but that no step has been handed in, that what others have handed in was refused, or
  // that the daemon is stopped.
  if (reason == "STEP_OUT_OF_ORDER" || reason == "ATTEMPT_OUT_OF_ORDER" ||
      absl::IsInvalidArgument(status) || (absl::IsDeadlineExceeded(status) && reason.empty())) {
    return absl::OkStatus();
  }
  if (!status.ok()) return status;
  const Outcome outcome = FromProto(wait_reply_.outcome());
  if (outcome.kind == Outcome::Kind::kRolledBack) {
    return RolledBack(outcome.to_step, wait_reply_.outcome().epoch(),
                      outcome.reason != Outcome::Reason::kPeerLost);
  }
  // The next step lacks a rank; what this one has decided is published all the same, while lanes
  // live.
  const bool incomplete = outcome.reason == Outcome::Reason::kTrainerMissing && !poisoned;
  if (outcome.kind == Outcome::Kind::kAborted && !outcome.retry && !incomplete) {
    return Aborted(outcome);
  }
  return absl::OkStatus();
}

absl::StatusOr<Outcome> Session::Impl::Submit(const StepScalars& scalars,
                                              const SubmitOptions& options) {
  absl::Status status = CheckAttached("Submit");
  if (status.ok() && undecided_)
    status = WrongState("Submit: the last one is undecided; call Wait");
  if (status.ok()) status = CheckSubmit(options);
  if (!status.ok()) return status;
  return Surviving([&] { return TrySubmit(scalars, options); });
}

absl::StatusOr<Outcome> Session::Impl::Step(const StepScalars& scalars,
                                            const SubmitOptions& options) {
  absl::Status status = CheckAttached("Step");
  if (status.ok() && undecided_) status = WrongState("Step: the last one is undecided; call Wait");
  if (status.ok()) status = CheckSubmit(options);
  if (!status.ok()) return status;
  return Surviving([&] { return TryStep(scalars, options); });
}

absl::StatusOr<Outcome> Session::Impl::Wait(Milliseconds wait) {
  RETURN_IF_ERROR(CheckAttached("Wait"));
  if (!undecided_ && going_back_.ok()) {
    return WrongState("Wait: no step is submitted and undecided");
  }
  absl::StatusOr<Outcome> outcome = Settle(TryWait(wait));
  if (!carried_on_) return outcome;
  // The daemon that had the submission has gone with it.
  return Outcome{.kind = Outcome::Kind::kAborted,
                 .step = last_committed_step_ + 1,
                 .attempt = next_attempt_ - 1,
                 .reason = Outcome::Reason::kPeerLost,
                 .detail = "a daemon was lost, and the job has gone on from this step's beginning",
                 .retry = true,
                 .next_attempt = next_attempt_,
                 .durable_step = durable_step_};
}

absl::Status Session::Impl::WaitPublished(Milliseconds timeout) {
  RETURN_IF_ERROR(CheckAttached("WaitPublished"));
  return Surviving([&] { return going_back_.ok() ? TryWaitPublished(timeout) : going_back_; });
}

absl::Status Session::Impl::WaitPublished(CUstream_st* stream) {
  RETURN_IF_ERROR(CheckAttached("WaitPublished"));
  return Surviving([&] {
    absl::Status open = CheckOpen("WaitPublished");
    if (open.ok()) open = link_->memory().EnqueueWait(published_attempt_, stream);
    // What the caller enqueues next finds these weights, or newer ones.
    if (open.ok()) arrived_attempt_ = std::max(arrived_attempt_, published_attempt_);
    return open;
  });
}

absl::StatusOr<Snapshot> Session::Impl::SaveSnapshot() {
  RETURN_IF_ERROR(CheckAttached("SaveSnapshot"));
  v1::SaveSnapshotReply reply;
  RETURN_IF_ERROR(Surviving([&] {
    RETURN_IF_ERROR(CheckOpen("SaveSnapshot"));
    v1::SaveSnapshotRequest request;
    *request.mutable_key() = link_->Key();
    return link_->channel().Call("SaveSnapshot", &v1::Trainer::Stub::SaveSnapshot, request, reply,
                                 {});
  }));
  return Snapshot{.step = reply.step(), .path = reply.path()};
}

absl::StatusOr<int64_t> Session::Impl::LoadSnapshot(int64_t step) {
  RETURN_IF_ERROR(CheckAttached("LoadSnapshot"));
  v1::LoadSnapshotReply reply;
  ++loads_;
  RETURN_IF_ERROR(Surviving([&] {
    RETURN_IF_ERROR(CheckOpen("LoadSnapshot"));
    v1::LoadSnapshotRequest request;
    *request.mutable_key() = link_->Key();
    request.set_step(step);
    request.set_call(loads_);
    return link_->channel().Call("LoadSnapshot", &v1::Trainer::Stub::LoadSnapshot, request, reply,
                                 {});
  }));
  return reply.step();
}

absl::Status Session::Impl::Close() {
  if (closed_) return absl::OkStatus();
  closed_ = true;
  fault::FaultPoint("trainer.closing");
  // Weights that a stream waits for may still be on their way.
  const absl::Status finished = link_->memory().FinishStreams();
  absl::Status status;
  if (!link_->LostWithin(Milliseconds(0))) {
    v1::CloseSessionRequest request;
    *request.mutable_key() = link_->Key();
    v1::CloseSessionReply reply;
    status = link_->channel().Call("CloseSession", &v1::Trainer::Stub::CloseSession, request, reply,
                                   {.timeout = kCallSlack});
    // The reply was lost: the daemon has closed this trainer's attach socket, or is gone itself.
    if (ReasonOf(status) == kDaemonLost) status = absl::OkStatus();
  }
  link_->Disconnect();
  status.Update(finished);
  return status;
}

}  // namespace dmuond::client
