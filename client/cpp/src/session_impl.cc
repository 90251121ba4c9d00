#include "client/cpp/src/session_impl.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/src/convert.h"
#include "client/cpp/src/status.h"
#include "dmuond/wire/fault_point.h"

namespace dmuond::client {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

constexpr uint32_t kProtocolVersion = 1;
constexpr size_t kTrainerStateBytesMax = size_t{1} << 20;
// Of one call; longer waits are several calls.
constexpr Milliseconds kCallWaitMax{10'000};
// What a call may take beyond its own wait before it counts as lost.
constexpr Milliseconds kCallSlack{60'000};

std::string ClientName() {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  return absl::StrCat("dmuond-cpp ", host.data(), " pid ", ::getpid());
}

}  // namespace

v1::SessionKey Session::Impl::Key() const {
  v1::SessionKey key;
  key.set_session(opened_.session());
  key.set_incarnation(opened_.incarnation());
  return key;
}

absl::Status Session::Impl::CheckOpen(const char* call) const {
  if (closed_) return WrongState(absl::StrCat(call, ": the session is closed"));
  if (lost_.load()) return DaemonLost(call);
  return absl::OkStatus();
}

absl::Status Session::Impl::CheckAttached(const char* call) const {
  absl::Status open = CheckOpen(call);
  if (!open.ok()) return open;
  if (!memory_.complete()) return WrongState(absl::StrCat(call, " comes after Attach"));
  return absl::OkStatus();
}

absl::Status Session::Impl::Open(const std::string& path) {
  absl::StatusOr<std::unique_ptr<AttachSocket>> attach =
      AttachSocket::Connect(path + ".attach", options_.connect_timeout, [this] {
        lost_.store(true);
        memory_.Poison();
      });
  if (!attach.ok()) return attach.status();
  attach_ = *std::move(attach);
  channel_ = std::make_unique<Channel>(path, [this](Milliseconds grace) {
    // A call may see the end before the watcher's thread has run: lost() agrees with it.
    const bool gone = attach_->GoneWithin(grace);
    if (gone) lost_.store(true);
    return gone;
  });

  const std::string client = options_.client.empty() ? ClientName() : options_.client;
  v1::HelloRequest hello;
  hello.set_version_min(kProtocolVersion);
  hello.set_version_max(kProtocolVersion);
  hello.set_client(client);
  absl::Status status =
      channel_->Call("Hello", &v1::Trainer::Stub::Hello, hello, hello_, {.timeout = kCallSlack});
  if (!status.ok()) return status;

  v1::OpenSessionRequest open;
  open.set_nonce(attach_->nonce());
  open.set_job(options_.job);
  open.set_token(options_.token);
  open.set_rank(options_.rank);
  open.set_world_size(options_.world_size);
  open.set_resume(static_cast<v1::OpenSessionRequest::Resume>(options_.resume));
  open.set_home_lane(options_.home_lane < hello_.lanes() ? options_.home_lane : -1);
  open.set_poison_parameters(options_.poison);
  open.set_client(client);
  status = channel_->Call("OpenSession", &v1::Trainer::Stub::OpenSession, open, opened_, {});
  if (!status.ok()) return status;
  wire::FaultPoint("trainer.opened");
  last_committed_step_ = opened_.last_committed_step();
  trainer_state_ = opened_.trainer_state();
  if (opened_.has_durable_step()) durable_step_ = opened_.durable_step();
  *submit_request_.mutable_key() = Key();
  *wait_request_.mutable_key() = Key();
  return absl::OkStatus();
}

absl::StatusOr<Registered> Session::Impl::Register(const Layout& layout) {
  absl::Status status = CheckOpen("Register");
  if (!status.ok()) return status;
  if (memory_.has_layout()) return WrongState("Register: the session has a layout already");
  for (const Fragment& fragment : layout.fragments) {
    if (fragment.parameter < 0 ||
        static_cast<size_t>(fragment.parameter) >= layout.parameters.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "a fragment names parameter ", fragment.parameter, " of ", layout.parameters.size()));
    }
  }
  v1::RegisterLayoutRequest request;
  *request.mutable_key() = Key();
  ToProto(layout, request);
  v1::RegisterLayoutReply reply;
  status = channel_->Call("RegisterLayout", &v1::Trainer::Stub::RegisterLayout, request, reply, {});
  if (!status.ok()) return status;
  wire::FaultPoint("trainer.registered");
  Registered registered = FromProto(reply);
  if (registered.parameter_bucket.size() != layout.parameters.size()) {
    return absl::InternalError(absl::StrCat("RegisterLayout answered for ",
                                            registered.parameter_bucket.size(), " parameters of ",
                                            layout.parameters.size()));
  }
  for (const int32_t bucket : registered.parameter_bucket) {
    if (bucket < -1 || bucket >= static_cast<int64_t>(registered.buckets)) {
      return absl::InternalError(
          absl::StrCat("RegisterLayout answered with bucket ", bucket, " of ", registered.buckets));
    }
  }
  memory_.SetLayout(layout, registered);
  held_back_.assign(registered.buckets, 0);
  hold_none_.assign(registered.buckets, 0);
  return registered;
}

absl::Status Session::Impl::Attach() {
  absl::Status status = CheckOpen("Attach");
  if (!status.ok()) return status;
  if (!memory_.has_layout()) return WrongState("Attach comes after Register");
  if (memory_.complete()) return WrongState("Attach: the buffers are attached already");
  v1::AttachBuffersRequest request;
  *request.mutable_key() = Key();
  for (const ArenaSpec& spec : memory_.layout().arenas) {
    v1::Arena& arena = *request.add_arenas();
    arena.set_id(spec.id);
    arena.set_size_bytes(spec.size_bytes);
    arena.mutable_daemon();
  }
  v1::AttachBuffersReply reply;
  status = channel_->Call("AttachBuffers", &v1::Trainer::Stub::AttachBuffers, request, reply, {});
  if (!status.ok()) return status;
  while (!memory_.complete()) {
    absl::StatusOr<AttachSocket::Received> received = attach_->NextFrame();
    if (!received.ok()) return received.status();
    status = memory_.Map(*received);
    if (!status.ok()) return status;
  }
  wire::FaultPoint("trainer.attached");
  next_attempt_ = reply.next_attempt();
  if (!reply.published()) return absl::OkStatus();
  published_attempt_ = std::max<uint64_t>(1, next_attempt_) - (next_attempt_ > 1 ? 1 : 0);
  return WaitPublished(std::chrono::minutes(10));
}

void Session::Impl::MarkReady(int32_t bucket) {
  if (memory_.complete()) memory_.MarkReady(bucket, next_attempt_);
}

absl::Status Session::Impl::HoldBack(const std::vector<int32_t>& absent) {
  std::fill(held_back_.begin(), held_back_.end(), 0);
  for (const int32_t parameter : absent) {
    if (parameter < 0 || static_cast<size_t>(parameter) >= memory_.layout().parameters.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("absent parameter ", parameter, " of ", memory_.layout().parameters.size()));
    }
    if (memory_.bucket_of(parameter) >= 0) held_back_[memory_.bucket_of(parameter)] = 1;
  }
  return absl::OkStatus();
}

absl::StatusOr<Outcome> Session::Impl::Submit(const StepScalars& scalars,
                                              const SubmitOptions& options) {
  absl::Status status = CheckAttached("Submit");
  if (!status.ok()) return status;
  if (undecided_) return WrongState("Submit: the last one is undecided; call Wait");
  if (options.trainer_state.size() > kTrainerStateBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("trainer_state has ",
                                                   options.trainer_state.size(), " bytes, at most ",
                                                   kTrainerStateBytesMax, " are possible"));
  }
  status = HoldBack(options.absent);
  if (!status.ok()) return status;
  const Clock::time_point deadline = Clock::now() + options.wait;
  const uint64_t attempt = next_attempt_;
  // Lanes learn of absent gradients by the submit: buckets with one are marked after it.
  const bool marks_later = !options.absent.empty() && !options.withdraw;
  wire::FaultPoint("trainer.gradients");
  if (!options.withdraw) memory_.MarkAllReady(held_back_, attempt);
  wire::FaultPoint("trainer.signalled");
  memory_.MarkSubmitted(attempt);
  wire::FaultPoint("trainer.marked");

  const Milliseconds wait = marks_later ? Milliseconds(0) : std::min(options.wait, kCallWaitMax);
  submit_request_.set_step(last_committed_step_ + 1);
  submit_request_.set_attempt(attempt);
  ToProto(scalars, *submit_request_.mutable_scalars());
  submit_request_.mutable_absent()->Assign(options.absent.begin(), options.absent.end());
  submit_request_.set_withdraw(options.withdraw);
  submit_request_.set_trainer_state(options.trainer_state);
  submit_request_.set_wait_ms(static_cast<int32_t>(wait.count()));
  submitted_state_ = options.trainer_state;
  status = channel_->Call("SubmitStep", &v1::Trainer::Stub::SubmitStep, submit_request_,
                          submit_reply_, {.timeout = wait + kCallSlack});
  if (!status.ok()) return Refused(std::move(status));
  if (marks_later) memory_.MarkAllReady(hold_none_, attempt);
  undecided_ = true;
  wire::FaultPoint("trainer.submitted");
  if (submit_reply_.outcome().kind() != v1::Outcome::KIND_UNSPECIFIED) {
    return Answered(submit_reply_.outcome(), submit_reply_.timing());
  }
  return Wait(
      std::max(Milliseconds(0), std::chrono::duration_cast<Milliseconds>(deadline - Clock::now())));
}

absl::StatusOr<Outcome> Session::Impl::Wait(Milliseconds wait) {
  absl::Status status = CheckAttached("Wait");
  if (!status.ok()) return status;
  if (!undecided_) return WrongState("Wait: no step is submitted and undecided");
  const Clock::time_point deadline = Clock::now() + wait;
  wait_request_.set_step(last_committed_step_ + 1);
  wait_request_.set_attempt(next_attempt_);
  for (;;) {
    const auto left = std::chrono::ceil<Milliseconds>(deadline - Clock::now());
    if (left.count() <= 0) return Outcome{.step = wait_request_.step(), .attempt = next_attempt_};
    const Milliseconds once = std::min(left, kCallWaitMax);
    wait_request_.set_wait_ms(static_cast<int32_t>(once.count()));
    status = channel_->Call("WaitStep", &v1::Trainer::Stub::WaitStep, wait_request_, wait_reply_,
                            {.timeout = once + kCallSlack});
    if (!status.ok()) return Refused(std::move(status));
    if (wait_reply_.outcome().kind() != v1::Outcome::KIND_UNSPECIFIED) {
      return Answered(wait_reply_.outcome(), wait_reply_.timing());
    }
  }
}

absl::StatusOr<Outcome> Session::Impl::Answered(const v1::Outcome& message,
                                                const v1::StepTiming& timing) {
  Outcome outcome = FromProto(message);
  undecided_ = false;
  wire::FaultPoint("trainer.decided");
  timing_ = FromProto(timing);
  next_attempt_ = outcome.next_attempt;
  durable_step_ = outcome.durable_step;
  if (outcome.kind == Outcome::Kind::kCommitted || outcome.kind == Outcome::Kind::kSkipped) {
    last_committed_step_ = outcome.step;
    published_attempt_ = outcome.attempt;
    trainer_state_.swap(submitted_state_);
  }
  return outcome;
}

absl::Status Session::Impl::Refused(absl::Status status) {
  undecided_ = false;
  const auto metadata = MetadataOf(status);
  const auto next = metadata.find("next_attempt");
  uint64_t attempt = 0;
  if (next != metadata.end() && absl::SimpleAtoi(next->second, &attempt)) next_attempt_ = attempt;
  return status;
}

absl::Status Session::Impl::WaitPublished(Milliseconds timeout) {
  absl::Status status = CheckAttached("WaitPublished");
  if (!status.ok()) return status;
  switch (memory_.WaitPublished(published_attempt_, Clock::now() + timeout)) {
    case SessionMemory::Published::kYes:
      wire::FaultPoint("trainer.published");
      return absl::OkStatus();
    case SessionMemory::Published::kTimeout:
      return MakeError(
          absl::StatusCode::kDeadlineExceeded, "NOT_PUBLISHED",
          absl::StrCat("the weights after step ", last_committed_step_, " (attempt ",
                       published_attempt_, ") are not published after ", timeout.count(), " ms"));
    case SessionMemory::Published::kPoisoned:
      break;
  }
  return DaemonLost(absl::StrCat("waiting for the weights after step ", last_committed_step_));
}

absl::Status Session::Impl::AcknowledgeRollback(const Outcome& outcome) {
  v1::AckRollbackRequest request;
  *request.mutable_key() = Key();
  request.set_to_step(outcome.to_step);
  v1::AckRollbackReply reply;
  absl::Status status = channel_->Call("AckRollback", &v1::Trainer::Stub::AckRollback, request,
                                       reply, {.timeout = kCallSlack});
  if (!status.ok()) return status;
  next_attempt_ = reply.next_attempt();
  published_attempt_ = reply.next_attempt() - 1;
  last_committed_step_ = outcome.to_step;
  trainer_state_ = reply.trainer_state();
  return absl::OkStatus();
}

absl::Status Session::Impl::Close() {
  if (closed_) return absl::OkStatus();
  closed_ = true;
  wire::FaultPoint("trainer.closing");
  absl::Status status;
  if (!lost_.load()) {
    v1::CloseSessionRequest request;
    *request.mutable_key() = Key();
    v1::CloseSessionReply reply;
    status = channel_->Call("CloseSession", &v1::Trainer::Stub::CloseSession, request, reply,
                            {.timeout = kCallSlack});
    // The reply was lost: the daemon has closed this trainer's attach socket, or is gone itself.
    if (ReasonOf(status) == kDaemonLost) status = absl::OkStatus();
  }
  // The connection goes first: without the attach socket it is just another caller. The channel
  // asks the socket whether the daemon lives, so it must not outlive it.
  channel_.reset();
  attach_.reset();
  return status;
}

}  // namespace dmuond::client
