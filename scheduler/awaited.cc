#include "scheduler/awaited.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace dmuond::scheduler {
namespace {

// A line each: of a world of thousands the first are enough to go by.
constexpr size_t kAwaitedMax = 16;

std::string Who(const JobLacks& lacks, int32_t rank) {
  const auto place = lacks.places.find(rank);
  if (place == lacks.places.end()) return absl::StrCat("rank ", rank);
  const std::string pid =
      place->second.pid == 0 ? "" : absl::StrCat("pid ", place->second.pid, " ");
  return absl::StrCat("rank ", rank, " (", pid, "on node ", place->second.node, ")");
}

bool Open(const JobLacks& lacks, int32_t rank) {
  const auto place = lacks.places.find(rank);
  return place != lacks.places.end() && place->second.open;
}

void AddStep(const JobLacks& lacks, const Patience& patience, std::vector<Awaited>& awaited) {
  const StepLacks& steps = *lacks.steps;
  for (const auto& [rank, since] : steps.dead) {
    const bool coming = Open(lacks, rank.value());
    awaited.push_back(
        {absl::StrCat(Who(lacks, rank.value()), coming ? ", a replacement that is not attached yet"
                                                       : ", whose trainer has died"),
         since, since + patience.replacement,
         "the job ends with TRAINER_MISSING, unless a replacement has come"});
  }
  const std::string handed =
      steps.kind == AttemptKind::kStep
          ? absl::StrCat(", which has not submitted step ", steps.step.value())
          : std::string(", which has not pushed as others have");
  for (const TrainerRank rank : steps.silent) {
    awaited.push_back({absl::StrCat(Who(lacks, rank.value()), handed), steps.first_at,
                       steps.first_at + patience.step,
                       "it counts as dead, and a replacement is awaited"});
  }
  for (const NodeRank node : steps.gathering) {
    awaited.push_back({absl::StrCat("node ", node.value(),
                                    ", which collects the gradients of step ", steps.step.value()),
                       steps.last_at, steps.last_at + patience.work,
                       "the lane or trainer that hangs there is given up"});
  }
}

}  // namespace

std::vector<Awaited> WhoIsAwaited(const JobLacks& lacks, const Patience& patience) {
  std::vector<Awaited> awaited;
  for (const int32_t rank : lacks.unregistered) {
    awaited.push_back({absl::StrCat(Who(lacks, rank), ", which has not registered"),
                       lacks.registering_since, lacks.registering_since + patience.registration,
                       "the others hear RANKS_MISSING"});
  }
  for (const int32_t rank : lacks.not_back) {
    awaited.push_back(
        {absl::StrCat(Who(lacks, rank), ", which has not come back to step ", lacks.back_to),
         lacks.back_since, lacks.back_since + patience.step,
         "it counts as dead, and a replacement is awaited"});
  }
  for (const auto& [node, what] : lacks.preparing) {
    awaited.push_back({absl::StrCat("node ", node, ", which gets ready: ", what),
                       lacks.preparing_since, lacks.preparing_since + patience.registration,
                       "it is given up with NODE_NOT_READY, unless it gets something done"});
  }
  if (lacks.parked.has_value()) {
    awaited.push_back(
        {absl::StrCat("lanes that can work, the job being parked: ", lacks.parked->why),
         lacks.parked->since, lacks.parked->tried_again, "they are tried again"});
  }
  if (lacks.steps.has_value()) AddStep(lacks, patience, awaited);
  std::stable_sort(awaited.begin(), awaited.end(),
                   [](const Awaited& a, const Awaited& b) { return a.since < b.since; });
  if (awaited.size() > kAwaitedMax) {
    const Awaited& next = awaited[kAwaitedMax];
    const Awaited more{absl::StrCat(awaited.size() - kAwaitedMax, " more"), next.since, next.until,
                       next.otherwise};
    awaited.resize(kAwaitedMax);
    awaited.push_back(more);
  }
  return awaited;
}

std::optional<std::vector<Awaited>> AwaitedNews::Update(TimePoint now,
                                                        std::vector<Awaited> awaited) {
  if (!awaited.empty() && now - awaited.front().since < kAwaitedQuiet) awaited.clear();
  if (awaited == told_) return std::nullopt;
  told_ = awaited;
  return awaited;
}

}  // namespace dmuond::scheduler
