// What a lane reads in an attempt, worked out once from the plan: for each bucket, which boxes of
// which trainers are added into which memory. Gradients and, for a push, first weights are
// described alike.
#ifndef DMUOND_SERVER_LANE_COLLECT_WORK_H_
#define DMUOND_SERVER_LANE_COLLECT_WORK_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/ops.h"
#include "scheduler/step.h"
#include "server/lane/lane_job.h"

namespace dmuond::server::lane {

// A box of a local trainer's arena, or a partial sum that came along the rail.
struct CollectSource {
  int32_t rank = -1;  // -1: a partial sum
  uint32_t arena = 0;
  int64_t offset_bytes = 0;  // of the box's first element in the arena
  kernels::StridedBox box;   // without an address where it is a trainer's
  // A gradient of another device may be copied here, into its bucket's part of the landing, before
  // anything is computed with it. One without an address is read where it lies.
  kernels::StridedBox landing;
  uint8_t level = 0;       // of its subtree
  int32_t first_leaf = 0;  // into CollectBucket::leaves: what it consists of
  int32_t leaves = 1;
};

// One sum of sources, or the copy of one in its own type.
struct CollectTask {
  kernels::StridedBox dst;  // in staging memory
  int32_t first_source = 0;
  int32_t sources = 0;
  double reduce_factor = 1;
  // Owned, of gradients: the unit whose blocks' sums of squares come with this sum, because it is
  // all of the unit and begins at a block; -1: a pass of their own.
  int32_t squares_of = -1;
};

struct CollectBucket {
  std::vector<CollectTask> sums;   // partial sums for owners on other nodes
  std::vector<CollectTask> lones;  // lone fragments for them, in their own type
  std::vector<CollectTask> owned;  // into the gradient memory of owned units
  std::vector<CollectSource> sources;
  std::vector<scheduler::AbsentFragment> leaves;  // (rank, parameter) of every source's leaves
  std::vector<int32_t> ranks;                     // local trainers that are read, ascending
  std::vector<scheduler::UnitId> units;           // owned
  std::vector<scheduler::UnitId> norm_units;      // of them, those whose squares need a pass
  int64_t owned_bytes = 0;                        // read and written by the sums of `owned`
  // Its part of the landing: all its sources of other devices, or none of them. Where the landing
  // has no room for all buckets, parts lie over each other.
  int64_t landing_begin_bytes = 0;
  int64_t landing_bytes = 0;
  const std::vector<scheduler::Transfer>* transfers = nullptr;
};

enum class CollectKind : uint8_t { kGradients, kWeights };

[[nodiscard]] absl::StatusOr<std::vector<CollectBucket>> MakeCollectWork(const LaneJob& job,
                                                                         CollectKind kind);

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_COLLECT_WORK_H_
