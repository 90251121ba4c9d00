// Layouts for tests, in a line each.
#ifndef DMUOND_TESTS_SCHEDULER_LAYOUTS_H_
#define DMUOND_TESTS_SCHEDULER_LAYOUTS_H_

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/plan.h"

namespace dmuond::scheduler::testing {

inline Parameter Muon(std::string name, Extents shape) {
  Parameter parameter;
  parameter.name = std::move(name);
  parameter.shape = std::move(shape);
  parameter.route = Route::kMuon;
  return parameter;
}

inline Parameter AdamW(std::string name, Extents shape) {
  Parameter parameter = Muon(std::move(name), std::move(shape));
  parameter.route = Route::kAdamW;
  return parameter;
}

// Trainers one after the other over `nodes` nodes, and on each over its lanes.
class World {
 public:
  World(int32_t trainers, int32_t nodes, int32_t lanes_per_node)
      : nodes_(nodes), lanes_per_node_(lanes_per_node), ends_(trainers, 0) {
    const int32_t per_node = (trainers + nodes - 1) / nodes;
    for (int32_t rank = 0; rank < trainers; ++rank) {
      Registration registration;
      registration.rank = TrainerRank(rank);
      registration.node = NodeRank(rank / per_node);
      registration.home = LaneIndex(rank % per_node % lanes_per_node);
      registrations.push_back(std::move(registration));
    }
  }

  // One trainer's box of a parameter, contiguous in its arenas (0: gradients, 1: weights).
  World& Hold(int32_t rank, const Parameter& parameter, const Box& box,
              Contribution contribution = Contribution::kSum) {
    Registration& registration = registrations[rank];
    size_t index = 0;
    while (index < registration.parameters.size() &&
           registration.parameters[index].name != parameter.name) {
      ++index;
    }
    if (index == registration.parameters.size()) registration.parameters.push_back(parameter);
    Fragment fragment;
    fragment.rank = registration.rank;
    fragment.parameter = static_cast<int32_t>(index);
    fragment.box = box;
    fragment.contribution = contribution;
    fragment.gradient = {0, ends_[rank], RowMajorStrides(ShapeOf(box))};
    fragment.weight = {1, ends_[rank], RowMajorStrides(ShapeOf(box))};
    ends_[rank] += Elements(box) * 4;
    registration.fragments.push_back(std::move(fragment));
    return *this;
  }

  World& Replicate(const Parameter& parameter, Contribution contribution = Contribution::kSum) {
    for (int32_t rank = 0; rank < trainers(); ++rank) {
      Hold(rank, parameter, WholeBox(parameter.shape), contribution);
    }
    return *this;
  }

  // Rows over all trainers as torch.chunk cuts them: the last ones may be short or empty.
  World& ShardRows(const Parameter& parameter) {
    const int64_t chunk = (parameter.shape[0] + trainers() - 1) / trainers();
    for (int32_t rank = 0; rank < trainers(); ++rank) {
      Box box = WholeBox(parameter.shape);
      box.begin[0] = std::min<int64_t>(parameter.shape[0], rank * chunk);
      box.end[0] = std::min<int64_t>(parameter.shape[0], (rank + 1) * chunk);
      Hold(rank, parameter, box);
    }
    return *this;
  }

  [[nodiscard]] int32_t trainers() const { return static_cast<int32_t>(registrations.size()); }

  [[nodiscard]] absl::StatusOr<PlanInputs> Inputs() const {
    PlanInputs inputs;
    inputs.nodes = nodes_;
    inputs.lanes_per_node = lanes_per_node_;
    absl::Status status = MergeRegistrations(registrations, trainers(), inputs.layout);
    if (!status.ok()) return status;
    return inputs;
  }

  std::vector<Registration> registrations;

 private:
  int32_t nodes_;
  int32_t lanes_per_node_;
  std::vector<int64_t> ends_;
};

}  // namespace dmuond::scheduler::testing

#endif  // DMUOND_TESTS_SCHEDULER_LAYOUTS_H_
