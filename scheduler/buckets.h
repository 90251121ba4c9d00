// Which parameters become ready together.
#ifndef DMUOND_SCHEDULER_BUCKETS_H_
#define DMUOND_SCHEDULER_BUCKETS_H_

#include <cstdint>
#include <vector>

#include "scheduler/layout.h"

namespace dmuond::scheduler {

struct Buckets {
  int32_t count = 0;
  std::vector<int32_t> of_parameter;  // -1 for route kTrainer
};

// Takes parameters in their ready_order and begins a new bucket where the gradients of this one
// would pass `bucket_bytes` on the trainer that holds most of them. A parameter is never divided.
// Buckets are larger where there would be more than kBucketsMax of them.
[[nodiscard]] Buckets MakeBuckets(const Layout& layout, int64_t bucket_bytes);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_BUCKETS_H_
