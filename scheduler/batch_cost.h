// The least time in which one lane updates some number of equal matrices, over all ways to divide
// them into batches.
//
// Times are whole nanoseconds: sums do not depend on their order, nor comparisons on the compiler.
#ifndef DMUOND_SCHEDULER_BATCH_COST_H_
#define DMUOND_SCHEDULER_BATCH_COST_H_

#include <cstdint>
#include <vector>

#include "scheduler/cost_model.h"

namespace dmuond::scheduler {

using Nanoseconds = int64_t;
[[nodiscard]] Nanoseconds FromMicroseconds(double microseconds);
[[nodiscard]] double ToMicroseconds(Nanoseconds time);

class BatchCost {
 public:
  // Works the costs out for 0 to `count` such matrices, in batches of at most batch_max.
  BatchCost(const CostModel& model, const MatrixKind& matrix, int32_t count, int32_t batch_max);

  // The least time for `matrices` of them; it never falls as they become more. REQUIRES:
  // matrices <= count.
  [[nodiscard]] Nanoseconds Cost(int32_t matrices) const { return cost_[matrices]; }
  // The sizes of the batches that take that time, largest first.
  [[nodiscard]] std::vector<int32_t> Split(int32_t matrices) const;
  [[nodiscard]] int32_t batch_max() const { return batch_max_; }

 private:
  int32_t batch_max_;
  std::vector<Nanoseconds> cost_;
  std::vector<int32_t> last_batch_;  // a batch of the best split
};

// The smallest batch whose time per matrix is that of the best one and `slack` times as much:
// larger ones only cost spare slots and workspace, and keep finished weights waiting for their
// neighbours.
[[nodiscard]] int32_t PreferredBatch(const CostModel& model, const MatrixKind& matrix,
                                     int32_t count, double slack);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_BATCH_COST_H_
