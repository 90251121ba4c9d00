#include "server/daemon/calls/place_finder.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/common/errors.h"
#include "server/daemon/calls/awaited.h"

namespace dmuond::server {
namespace {

using std::chrono::steady_clock;

// From the answer to a trainer's question to the first session of its job.
constexpr std::chrono::seconds kKept{10};
// Longer than node 0 waits before it says that no place is free.
constexpr std::chrono::seconds kAnswerComes{30};
constexpr std::chrono::milliseconds kLookAtCaller{250};

// All places are taken. Says which of their jobs have no trainer that lives.
absl::Status JobsTooMany(const std::string& job, size_t places, const v1::PlaceFound& answer) {
  const auto with_command = [](std::string* out, const std::string& name) {
    absl::StrAppend(out, "'", name, "' (`dmuonctl job end ", name, "` ends it now)");
  };
  const std::string dead = answer.dead().empty()
                               ? ""
                               : absl::StrCat(". Waiting for replacements of dead trainers: ",
                                              absl::StrJoin(answer.dead(), ", ", with_command));
  return Error(
      absl::StatusCode::kResourceExhausted, "JOBS_TOO_MANY",
      Say("job '", Named("job", job), "' is one too many: ", Named("jobs_max", places),
          " can run on this group at a time, which has '",
          Named("holders", absl::StrJoin(answer.holders(), "', '")), "' (--jobs_max)", dead));
}

}  // namespace

PlaceFinder::PlaceFinder(std::deque<Place>& places)
    : places_(places), options_(places.front().core.options), jobs_(places.size(), kKept) {}

std::optional<int32_t> PlaceFinder::Here(const std::string& job) {
  for (Place& place : places_) {
    StateLock lock(place.core.mutex);
    if (place.core.job.exists() && place.core.job.name() == job) return place.core.place;
  }
  return std::nullopt;
}

absl::Status PlaceFinder::WaitForGroup(const Core::Cancelled& cancelled) {
  Core& core = places_.front().core;
  StateLock lock(core.mutex);
  const absl::StatusOr<bool> formed = core.Wait(
      [&]() DMUOND_REQUIRES(core.mutex) { return core.job.epoch() != 0 || core.job.leaves(); },
      steady_clock::now() + options_.coordinator.register_timeout, cancelled);
  if (!formed.ok()) return formed.status();
  if (core.job.leaves()) {
    return Error(absl::StatusCode::kUnavailable, "DRAINING", "this daemon is leaving");
  }
  if (*formed) return absl::OkStatus();
  return GroupNotFormed(core);
}

absl::StatusOr<int32_t> PlaceFinder::Find(const std::string& job,
                                          const Core::Cancelled& cancelled) {
  for (;;) {
    if (const auto here = Here(job); here.has_value()) return *here;
    if (absl::Status formed = WaitForGroup(cancelled); !formed.ok()) return formed;
    MutexLock lock(mutex_);
    const uint64_t request = ++newest_;
    asked_[request];
    v1::FindPlace question;
    question.set_request(request);
    question.set_job(job);
    if (options_.node == 0) {
      questions_.push_back({0, question, steady_clock::now() + kKept});
      Answer();
    } else {
      v1::MemberMessage message;
      *message.mutable_find_place() = question;
      places_.front().core.peers->SendToCoordinator(message);
    }
    const auto ask_again = steady_clock::now() + kAnswerComes;
    const auto open = [&]() DMUOND_REQUIRES(mutex_) {
      const auto found = asked_.find(request);
      return found != asked_.end() && !found->second.has_value();
    };
    while (open() && steady_clock::now() < ask_again && !cancelled()) {
      answered_.WaitUntil(mutex_, steady_clock::now() + kLookAtCaller);
    }
    const auto found = asked_.find(request);
    const std::optional<v1::PlaceFound> answer =
        found == asked_.end() ? std::nullopt : found->second;
    asked_.erase(request);
    if (cancelled()) return absl::CancelledError("the caller has gone");
    if (!answer.has_value()) continue;
    if (answer->place() >= 0 && answer->place() < static_cast<int32_t>(places_.size())) {
      return answer->place();
    }
    return JobsTooMany(job, places_.size(), *answer);
  }
}

void PlaceFinder::OnQuestion(int32_t node, const v1::FindPlace& question) {
  MutexLock lock(mutex_);
  questions_.push_back({node, question, steady_clock::now() + kKept});
  Answer();
}

void PlaceFinder::OnAnswer(const v1::PlaceFound& answer) {
  MutexLock lock(mutex_);
  const auto found = asked_.find(answer.request());
  if (found == asked_.end()) return;
  found->second = answer;
  answered_.NotifyAll();
}

void PlaceFinder::OnNewGroup() {
  MutexLock lock(mutex_);
  questions_.clear();
  asked_.clear();
  answered_.NotifyAll();
}

bool PlaceFinder::Awaits(const std::string& job) {
  MutexLock lock(mutex_);
  const bool asked = std::any_of(questions_.begin(), questions_.end(),
                                 [&](const Question& one) { return one.what.job() == job; });
  return asked || jobs_.Awaits(steady_clock::now(), job);
}

void PlaceFinder::Tick() {
  if (options_.node != 0 || places_.size() == 1) return;
  MutexLock lock(mutex_);
  Answer();
}

void PlaceFinder::Answer() {
  std::vector<scheduler::JobPlaces::Running> running;
  std::vector<std::string> dead;
  bool known = true;
  for (Place& place : places_) {
    StateLock lock(place.core.mutex);
    const scheduler::GroupJob& job = *place.core.coordinator;
    known = known && job.Formed();
    running.push_back({job.name(), job.begun()});
    if (job.dead()) dead.push_back(job.name());
  }
  if (!known) return;
  const auto now = steady_clock::now();
  jobs_.Look(running);
  std::deque<Question> open;
  for (Question& question : std::exchange(questions_, {})) {
    v1::PlaceFound answer;
    answer.set_request(question.what.request());
    if (const auto place = jobs_.Find(now, question.what.job(), running); place.has_value()) {
      answer.set_place(*place);
    } else if (now < question.give_up) {
      open.push_back(std::move(question));
      continue;
    } else {
      answer.set_place(-1);
      for (std::string& job : jobs_.holders()) answer.add_holders(std::move(job));
      answer.mutable_dead()->Assign(dead.begin(), dead.end());
    }
    Send(question.node, answer);
  }
  questions_ = std::move(open);
}

void PlaceFinder::Send(int32_t node, const v1::PlaceFound& answer) {
  if (node != options_.node) {
    v1::CoordinatorMessage message;
    *message.mutable_place_found() = answer;
    return places_.front().core.peers->SendToMembers(node, message);
  }
  const auto found = asked_.find(answer.request());
  if (found == asked_.end()) return;
  found->second = answer;
  answered_.NotifyAll();
}

}  // namespace dmuond::server
