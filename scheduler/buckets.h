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

// Parameters by ready_order, cut where a bucket would pass `bucket_bytes` of gradients on the
// trainer that holds most of them; a parameter is never cut. Where that makes more than kBucketsMax
// buckets, they are larger.
[[nodiscard]] Buckets MakeBuckets(const Layout& layout, int64_t bucket_bytes);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_BUCKETS_H_
