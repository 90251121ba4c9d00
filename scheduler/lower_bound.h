// A time that no assignment can beat.
#ifndef DMUOND_SCHEDULER_LOWER_BOUND_H_
#define DMUOND_SCHEDULER_LOWER_BOUND_H_

#include "scheduler/assignment.h"

namespace dmuond::scheduler {

// For every assignment with batches of at most kBatchMax, whatever the memory: the slowest lane
// takes at least this long. Proof: each of the conditions below is necessary for an assignment of
// makespan T to exist, and is monotone in T; the bound is the smallest T that satisfies all.
//
// Let f_k(x) be the least time for x matrices of class k (BatchCost with kBatchMax), and s_k + t_k
// x a line below it for all x >= 1: t_k = min_x (f_k(x) - f_k(1)) / (x - 1), s_k = f_k(1) - t_k.
// Let b_l be the load that lane l has anyway.
//  1. T >= max_l b_l.
//  2. Every matrix lies somewhere: T >= min_l b_l + f_k(1).
//  3. Area: class k lies on at least m_k = ceil(n_k / max{x : f_k(x) <= T - min_l b_l}) lanes.
//     All work together is at least sum_k (t_k n_k + s_k m_k) + divisible, and must fit into
//     sum_l max(0, T - b_l).
//  4. Pigeonhole: of the classes with the largest t, a lane with room r = T - b_l holds at most
//     floor((r - min s) / min t) matrices; together the lanes must hold all of them.
[[nodiscard]] Nanoseconds LowerBound(const AssignmentProblem& problem);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_LOWER_BOUND_H_
