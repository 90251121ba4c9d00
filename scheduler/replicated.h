// Divides replicated AdamW tensors among all lanes: a lane with less other work gets more of them.
#ifndef DMUOND_SCHEDULER_REPLICATED_H_
#define DMUOND_SCHEDULER_REPLICATED_H_

#include <cstdint>
#include <vector>

#include "scheduler/batch_cost.h"
#include "scheduler/pieces.h"

namespace dmuond::scheduler {

[[nodiscard]] Nanoseconds PieceCost(const CostModel& model, int64_t elements);  // rounded up

// What a lane holds and does already.
struct LaneBudget {
  std::vector<Nanoseconds> load;
  std::vector<int64_t> bytes;
  int64_t memory_bytes = 0;  // per lane; 0: no limit
};

// Divides the cells among all lanes so that loads become level, and bytes among lanes of equal
// load. Adds to `budget` what each lane gets, and appends the pieces. Cells of up to kPieceWholeMax
// elements stay whole.
void SpreadReplicated(const Layout& layout, const CostModel& model,
                      const std::vector<HeldCell>& cells, LaneBudget& budget,
                      std::vector<Unit>& pieces);

// State and staging of a piece of this many elements.
[[nodiscard]] int64_t PieceBytes(int64_t elements, ElementType weight_type);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_REPLICATED_H_
