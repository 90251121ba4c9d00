// Fills lanes one after the other up to a given time, each as well as possible: finds the regular
// patterns ("two of the large ones", "one large, one middle, three small") that moving single
// matrices does not.
#ifndef DMUOND_SCHEDULER_LANE_FILLING_H_
#define DMUOND_SCHEDULER_LANE_FILLING_H_

#include "scheduler/lane_loads.h"

namespace dmuond::scheduler {

// Puts all matrices of the problem on lanes such that no lane takes longer than `makespan`. False:
// it found no way (there may be one), and `lanes` is left half filled. Each lane in turn gets the
// set of remaining matrices that fills it best, found by an exact dynamic program over time in
// steps of makespan / 2048, rounded up. REQUIRES: `lanes` is empty.
[[nodiscard]] bool FillLanes(const AssignmentProblem& problem, const std::vector<BatchCost>& costs,
                             Nanoseconds makespan, LaneLoads& lanes);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_LANE_FILLING_H_
