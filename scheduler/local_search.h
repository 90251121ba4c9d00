// Makes an assignment better by moving matrices away from the slowest lane.
#ifndef DMUOND_SCHEDULER_LOCAL_SEARCH_H_
#define DMUOND_SCHEDULER_LOCAL_SEARCH_H_

#include "scheduler/lane_loads.h"

namespace dmuond::scheduler {

// Again and again moves a few matrices from the slowest lane to another one, or swaps them for a
// few of another class. A move counts if both lanes are then faster than the slowest was; of all
// such moves the one is made whose slower lane is fastest. Ends when there is no such move, when no
// lane is above `target`, or after a fixed number of moves was looked at. It never looks at the
// clock: the result is a function of the input.
void ImproveSlowestLane(Nanoseconds target, LaneLoads& lanes);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_LOCAL_SEARCH_H_
