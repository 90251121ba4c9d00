// Compares the first weights of a fresh job, by their digests: all trainers that hold a box of a
// parameter should begin with the same values. Each rank hands in its digests; a difference is
// found as soon as both ranks have.
//
// Pure; threads: one at a time.
#ifndef DMUOND_SCHEDULER_WEIGHT_DIGESTS_H_
#define DMUOND_SCHEDULER_WEIGHT_DIGESTS_H_

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "scheduler/box.h"
#include "scheduler/layout.h"
#include "scheduler/reason.h"
#include "scheduler/types.h"

namespace dmuond::scheduler {

class WeightDigests {
 public:
  // Hands in, or replaces, the digests of a rank: one for each fragment of its registration, in
  // that order. An empty digest, and one of a parameter on route kTrainer, is not compared.
  // `broadcast`: the rank takes the lowest rank's weights where it has others, and lets others take
  // its own; a difference between two ranks counts unless both say so. Boxes of one parameter that
  // overlap without being equal cannot be compared: they count as different.
  //
  // Returns a difference with another rank, for people: parameter, boxes, both ranks, and the ways
  // out. REQUIRES: as many digests as fragments.
  [[nodiscard]] std::optional<Message> Set(const Registration& registration,
                                           const std::vector<std::string>& digests, bool broadcast);
  void Remove(TrainerRank rank);
  void Clear() { *this = WeightDigests(); }

 private:
  // Ranks whose digests of a box are equal.
  struct Version {
    std::string digest;
    std::vector<TrainerRank> strict;
    std::vector<TrainerRank> broadcasting;
  };
  struct HeldBox {
    Box box;
    std::vector<Version> versions;
  };

  std::set<TrainerRank> ranks_;
  std::map<std::string, std::vector<HeldBox>> parameters_;  // by name
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_WEIGHT_DIGESTS_H_
