// Decides which matrix goes to which lane, once it is known how many of each shape every lane owns.
// All choices take the same time to update; a matrix goes where most of it lies already.
#ifndef DMUOND_SCHEDULER_PLACEMENT_H_
#define DMUOND_SCHEDULER_PLACEMENT_H_

#include <cstdint>
#include <vector>

#include "scheduler/layout.h"
#include "scheduler/unit.h"

namespace dmuond::scheduler {

struct Members {
  int32_t nodes = 1;
  int32_t lanes_per_node = 1;
  [[nodiscard]] int32_t lanes() const { return nodes * lanes_per_node; }
  [[nodiscard]] LaneId HomeOf(const Trainer& trainer) const {
    return LaneId(trainer.node.value() * lanes_per_node + trainer.home.value());
  }
};

// Sets the owner of every matrix in `units`. `class_of[i]` is the class of units[i], counts[l][k]
// how many of class k lane l gets (together as many as there are). `holders[i]`: fragments that
// hold a part of units[i]. First come the owners that most elements are near to: on the node, then
// on the lane; among equals the lane that has least to collect in the same bucket, so that all
// rails work on every bucket.
void Place(const Layout& layout, const Members& members,
           const std::vector<std::vector<int32_t>>& holders, const std::vector<int32_t>& class_of,
           std::vector<std::vector<int32_t>> counts, std::vector<Unit>& units);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_PLACEMENT_H_
