// How units are cut for a check of all copies: into boxes that a lane digests between two steps
// without holding one up for long.
#ifndef DMUOND_SCHEDULER_EXTRACT_H_
#define DMUOND_SCHEDULER_EXTRACT_H_

#include <cstdint>
#include <vector>

#include "scheduler/box.h"

namespace dmuond::scheduler {

inline constexpr int64_t kExtractElementsMax = int64_t{1} << 20;

// Boxes of at most kExtractElementsMax elements that make up `box`: the same for the same box.
[[nodiscard]] std::vector<Box> Extracts(const Box& box);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_EXTRACT_H_
