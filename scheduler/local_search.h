// Makes an assignment better by moving matrices away from the slowest lane.
#ifndef DMUOND_SCHEDULER_LOCAL_SEARCH_H_
#define DMUOND_SCHEDULER_LOCAL_SEARCH_H_

#include "scheduler/lane_loads.h"

namespace dmuond::scheduler {

// Moves up to a few matrices from the slowest lane to another, or swaps them for a few of another
// class, as long as that makes both lanes faster than the slowest was; of all such moves the one
// that leaves the slower of the two fastest. Ends when there is none, when no lane is above
// `target`, or after a fixed number of looked-at moves (never by the clock: the result is a
// function of the input).
void ImproveSlowestLane(Nanoseconds target, LaneLoads& lanes);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_LOCAL_SEARCH_H_
