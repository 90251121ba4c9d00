#include "scheduler/weight_digests.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace dmuond::scheduler {
namespace {

constexpr char kWaysOut[] =
    "give all ranks the same first weights (one seed, or one checkpoint, before they are "
    "attached); "
    "or say broadcast=True on all ranks where the lowest rank's are meant for all; or give what is "
    "not one tensor (experts, say) another name or box on each rank";

// The lowest rank that minds a difference with a rank that is, or is not, `broadcast`.
std::optional<TrainerRank> WhoMinds(const std::vector<TrainerRank>& strict,
                                    const std::vector<TrainerRank>& broadcasting, bool broadcast) {
  std::optional<TrainerRank> lowest;
  const auto look = [&lowest](const std::vector<TrainerRank>& ranks) {
    for (const TrainerRank rank : ranks) lowest = std::min(lowest.value_or(rank), rank);
  };
  look(strict);
  if (!broadcast) look(broadcasting);
  return lowest;
}

Message Differ(const std::string& parameter, const Box& box, TrainerRank a, TrainerRank b) {
  return Say("parameter '", Named("parameter", parameter), "', box ", Named("box", ToString(box)),
             ": the first weights of rank ", Named("rank", std::min(a, b).value()), " and of rank ",
             Named("other_rank", std::max(a, b).value()), " differ; ", kWaysOut);
}

Message Overlap(const std::string& parameter, std::pair<TrainerRank, const Box*> a,
                std::pair<TrainerRank, const Box*> b) {
  if (b.first < a.first) std::swap(a, b);
  return Say("parameter '", Named("parameter", parameter), "': box ",
             Named("box", ToString(*a.second)), " of rank ", Named("rank", a.first.value()),
             " and box ", Named("other_box", ToString(*b.second)), " of rank ",
             Named("other_rank", b.first.value()),
             " overlap without being equal, and whether their first weights agree cannot be seen "
             "from digests; ",
             kWaysOut);
}

}  // namespace

std::optional<Message> WeightDigests::Set(const Registration& registration,
                                          const std::vector<std::string>& digests, bool broadcast) {
  const TrainerRank rank = registration.rank;
  Remove(rank);
  ranks_.insert(rank);
  std::optional<Message> difference;
  for (size_t f = 0; f < digests.size(); ++f) {
    const Fragment& fragment = registration.fragments[f];
    const Parameter& parameter = registration.parameters[fragment.parameter];
    if (digests[f].empty() || parameter.route == Route::kTrainer || Empty(fragment.box)) continue;
    std::vector<HeldBox>& boxes = parameters_[parameter.name];
    HeldBox* mine = nullptr;
    for (HeldBox& held : boxes) {
      const bool equal = held.box == fragment.box;
      if (equal) mine = &held;
      if (difference.has_value() || (!equal && !Intersects(held.box, fragment.box))) continue;
      for (const Version& version : held.versions) {
        if (equal && version.digest == digests[f]) continue;
        const auto other = WhoMinds(version.strict, version.broadcasting, broadcast);
        if (!other.has_value()) continue;
        difference = equal ? Differ(parameter.name, held.box, rank, *other)
                           : Overlap(parameter.name, {rank, &fragment.box}, {*other, &held.box});
        break;
      }
    }
    if (mine == nullptr) mine = &boxes.emplace_back(HeldBox{.box = fragment.box, .versions = {}});
    auto version = std::ranges::find(mine->versions, digests[f], &Version::digest);
    if (version == mine->versions.end()) {
      version = mine->versions.insert(version, Version{.digest = digests[f]});
    }
    (broadcast ? version->broadcasting : version->strict).push_back(rank);
  }
  return difference;
}

void WeightDigests::Remove(TrainerRank rank) {
  if (ranks_.erase(rank) == 0) return;
  for (auto& [name, boxes] : parameters_) {
    for (HeldBox& held : boxes) {
      for (Version& version : held.versions) {
        std::erase(version.strict, rank);
        std::erase(version.broadcasting, rank);
      }
      std::erase_if(held.versions, [](const Version& version) {
        return version.strict.empty() && version.broadcasting.empty();
      });
    }
    std::erase_if(boxes, [](const HeldBox& held) { return held.versions.empty(); });
  }
}

}  // namespace dmuond::scheduler
