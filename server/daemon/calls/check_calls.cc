#include "server/daemon/calls/check_calls.h"

#include <chrono>
#include <optional>
#include <utility>

#include "server/common/errors.h"
#include "server/daemon/calls/admin_calls.h"
#include "server/daemon/calls/session_keys.h"

namespace dmuond::server {
namespace {

constexpr int64_t kCheckMaxMs = 3'600'000;
constexpr std::chrono::seconds kNode0AnswersWithin{5};  // node 0, when the check's time is over

}  // namespace

absl::StatusOr<v1::CheckJobReply> CheckCalls::CheckJob(const v1::CheckJobRequest& request,
                                                       const Core::Cancelled& cancelled) {
  if (request.timeout_ms() < 1 || request.timeout_ms() > kCheckMaxMs) {
    return Error(absl::StatusCode::kInvalidArgument, "CHECK_INVALID",
                 Say("a check within ", Named("timeout_ms", request.timeout_ms()), " ms: 1 to ",
                     kCheckMaxMs));
  }
  const auto patience = std::chrono::milliseconds(request.timeout_ms());
  const auto deadline = std::chrono::steady_clock::now() + patience + kNode0AnswersWithin;
  StateLock lock(core_.mutex);
  const scheduler::NodeJob& job = core_.held_job();
  if (!job.exists() || job.plan() == nullptr) return NoPlan();
  const uint64_t number = job.number();
  const auto answer = core_.checks_wanted.emplace(RandomKeyHalf(), std::nullopt).first;
  v1::MemberMessage message;
  message.mutable_check_request()->set_request(answer->first);
  message.mutable_check_request()->set_patience_ms(patience.count());
  absl::StatusOr<bool> come = false;
  do {
    // A group that forms anew may not have heard.
    const uint32_t epoch = job.epoch();
    if (epoch != 0) core_.Tell(message);
    come = core_.Wait(
        [&]() DMUOND_REQUIRES(core_.mutex) {
          return answer->second.has_value() || job.number() != number || job.epoch() != epoch;
        },
        deadline, cancelled);
  } while (come.ok() && *come && !answer->second.has_value() && job.number() == number);
  std::optional<v1::CheckDone> done = std::move(answer->second);
  core_.checks_wanted.erase(answer);
  if (!come.ok()) return come.status();
  if (!done.has_value() && *come) {
    return Error(absl::StatusCode::kUnavailable, "JOB_ENDED", "the job ended");
  }
  if (!done.has_value()) {
    return Error(absl::StatusCode::kUnavailable, "CHECK_UNANSWERED",
                 "the check has not come to its end in time: one before it has taken that long, or "
                 "node 0, which makes checks, does not answer");
  }
  if (!done->error().empty()) {
    return Error(absl::StatusCode::kUnavailable, done->reason(), done->error());
  }
  v1::CheckJobReply reply;
  done->clear_requests();
  *reply.mutable_result() = *std::move(done);
  return reply;
}

}  // namespace dmuond::server
