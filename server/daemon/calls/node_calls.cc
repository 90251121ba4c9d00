#include "server/daemon/calls/node_calls.h"

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_join.h"
#include "dmuond/wire/start_thread.h"
#include "server/common/errors.h"
#include "server/daemon/node_view.h"

namespace dmuond::server {
namespace {

// Time for the threads of disks and memory to see that nobody wants what they do any more.
constexpr std::chrono::seconds kThreadsEndWithin{2};

std::string NameOf(const Core::Seen& seen) { return seen.view->status.job().name(); }

std::vector<std::string> NamesOf(const std::vector<Core::Seen>& places) {
  std::vector<std::string> names;
  for (const Core::Seen& seen : places) {
    if (seen.view->status.has_job()) names.push_back(NameOf(seen));
  }
  return names;
}

absl::StatusOr<v1::DrainReply> Together(const std::vector<absl::StatusOr<v1::DrainReply>>& places) {
  v1::DrainReply reply;
  for (const absl::StatusOr<v1::DrainReply>& left : places) {
    if (!left.ok()) return left.status();
    reply.MergeFrom(*left);
  }
  return reply;
}

}  // namespace

std::vector<Core::Seen> NodeCalls::Look() {
  const auto asked = std::chrono::steady_clock::now();
  for (Place& place : places_) place.core.AskToLook();
  std::vector<Core::Seen> seen;
  seen.reserve(places_.size());
  for (Place& place : places_) seen.push_back(place.core.LookAfter(asked));
  return seen;
}

absl::StatusOr<Place*> NodeCalls::PlaceOf(const std::string& job) {
  const std::vector<Core::Seen> seen = Look();
  const std::vector<std::string> names = NamesOf(seen);
  if (job.empty() && names.size() > 1) {
    return Error(absl::StatusCode::kInvalidArgument, "JOB_NOT_NAMED",
                 Say("several jobs are here, '", Named("jobs", absl::StrJoin(names, "', '")),
                     "': say which (dmuonctl --job)"));
  }
  for (size_t i = 0; i < seen.size(); ++i) {
    if (!seen[i].view->status.has_job()) continue;
    if (job.empty() || NameOf(seen[i]) == job) return &places_[i];
  }
  if (job.empty()) return &places_.front();  // which says what it lacks
  return NoJob(job, names);
}

absl::StatusOr<v1::GetStatusReply> NodeCalls::Status(const v1::GetStatusRequest& request) {
  const std::vector<Core::Seen> seen = Look();
  const std::vector<std::string> names = NamesOf(seen);
  const auto shown = std::find_if(seen.begin(), seen.end(), [&](const Core::Seen& place) {
    return request.job().empty() ? place.view->status.has_job() : NameOf(place) == request.job();
  });
  if (shown == seen.end() && !request.job().empty()) return NoJob(request.job(), names);
  const auto place = shown == seen.end() ? seen.begin() : shown;
  v1::GetStatusReply reply = places_[place - seen.begin()].admin.StatusIn(*place);
  reply.mutable_jobs()->Assign(names.begin(), names.end());
  reply.set_jobs_max(static_cast<int32_t>(places_.size()));
  for (const Core::Seen& each : seen) {
    reply.set_picture_age_ms(std::max<int64_t>(reply.picture_age_ms(), each.age.count()));
    const std::string& hangs = each.view->status.snapshot_dir_hangs();
    if (reply.snapshot_dir_hangs().empty()) reply.set_snapshot_dir_hangs(hangs);
  }
  return reply;
}

v1::ListJobsReply NodeCalls::Jobs() {
  const std::vector<Core::Seen> seen = Look();
  v1::ListJobsReply reply;
  for (size_t i = 0; i < seen.size(); ++i) {
    const v1::GetStatusReply status = places_[i].admin.StatusIn(seen[i]);
    if (status.has_job()) *reply.add_jobs() = status.job();
    reply.set_picture_age_ms(std::max(reply.picture_age_ms(), status.picture_age_ms()));
  }
  return reply;
}

log::Level NodeCalls::SetLogLevel(log::Level level) {
  const log::Level previous = log::CurrentLevel();
  for (Place& place : places_) place.admin.SetLogLevel(level);
  return previous;
}

absl::Status NodeCalls::CheckSnapshots() {
  for (Place& place : places_) {
    if (absl::Status checked = place.admin.CheckSnapshots(); !checked.ok()) return checked;
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::DrainReply> NodeCalls::PrepareToLeave(std::chrono::milliseconds timeout) {
  std::vector<absl::StatusOr<v1::DrainReply>> left(places_.size());
  const auto leave = [&](size_t i) { left[i] = places_[i].admin.PrepareToLeave(timeout); };
  std::vector<std::thread> threads;
  std::vector<size_t> here = {0};
  for (size_t i = 1; i < places_.size(); ++i) {
    absl::StatusOr<std::thread> thread =
        wire::StartThread("a job's drain", [&leave, i] { leave(i); });
    if (thread.ok()) {
      threads.push_back(*std::move(thread));
    } else {
      here.push_back(i);  // one after the other, then
    }
  }
  for (const size_t i : here) leave(i);
  for (std::thread& thread : threads) thread.join();
  return Together(left);
}

absl::StatusOr<v1::DrainReply> NodeCalls::WaitUntilPrepared(const Core::Cancelled& cancelled) {
  std::vector<absl::StatusOr<v1::DrainReply>> left;
  for (Place& place : places_) left.push_back(place.admin.WaitUntilPrepared(cancelled));
  return Together(left);
}

bool NodeCalls::Leave() {
  const auto deadline = std::chrono::steady_clock::now() + kThreadsEndWithin;
  bool ended = true;
  for (Place& place : places_) ended = place.admin.Leave(deadline) && ended;
  return ended;
}

}  // namespace dmuond::server
