// Fills lanes one after the other up to a given time, each as well as possible: finds the regular
// patterns ("two of the large ones", "one large, one middle, three small") that moving single
// matrices does not.
#ifndef DMUOND_SCHEDULER_LANE_FILLING_H_
#define DMUOND_SCHEDULER_LANE_FILLING_H_

#include "scheduler/lane_loads.h"

namespace dmuond::scheduler {

// Puts all matrices of the problem on lanes, none of them done later than `makespan`; false if that
// did not work out (which proves nothing). `lanes` must be empty and is left half filled then.
// Each lane gets the set of what is left that fills it best by an exact dynamic program over time
// in steps of makespan / 2048, rounded up.
[[nodiscard]] bool FillLanes(const AssignmentProblem& problem, const std::vector<BatchCost>& costs,
                             Nanoseconds makespan, LaneLoads& lanes);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_LANE_FILLING_H_
