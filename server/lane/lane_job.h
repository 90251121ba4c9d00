// What a lane knows and holds of its job: the plan, its program, and its mappings of the daemon's
// memory.
#ifndef DMUOND_SERVER_LANE_LANE_JOB_H_
#define DMUOND_SERVER_LANE_LANE_JOB_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "dmuond/v1/lane.pb.h"
#include "dmuond/wire/unique_fd.h"
#include "kernels/device.h"
#include "kernels/ops.h"
#include "scheduler/plan.h"
#include "server/storage/host_copy.h"

namespace dmuond::server::lane {

// Immutable after Make(); at a fixed place, so that others may point into it.
struct LaneJob {
  std::string name;
  uint32_t epoch = 0;
  scheduler::PlanInputs inputs;
  scheduler::Plan plan;
  scheduler::LaneProgram program;
  std::vector<kernels::MuonConfig> configs;  // per group
  std::vector<bool> local;                   // per rank: on this node
  bool has_trainers = false;                 // any of them
  std::vector<int32_t> staged_index;         // per unit: into program.staged, -1: not owned
  std::vector<std::vector<int32_t>>
      publishers;                             // per bucket: lane indices of this node with a part
  std::unique_ptr<kernels::Mapping> state;    // null: the lane owns nothing
  std::unique_ptr<kernels::Mapping> staging;  // null: nothing to stage
  std::unique_ptr<kernels::Mapping> table;
  std::unique_ptr<kernels::Mapping> board;
  storage::HostCopy host_copy;                    // how state lies in host_memory
  std::unique_ptr<kernels::Mapping> host_memory;  // null: no snapshots, or nothing owned
  int64_t snapshot_staging_bytes = 0;

  // Converts, plans, compares the digest, maps. `fds`: as Configure says.
  // FAILED_PRECONDITION naming both digests, INVALID_ARGUMENT naming both sizes.
  static absl::StatusOr<std::unique_ptr<LaneJob>> Make(const v1::LaneCommand::Configure& configure,
                                                       const std::vector<wire::UniqueFd>& fds,
                                                       kernels::Device& device);

  [[nodiscard]] int32_t buckets() const { return plan.buckets; }
  [[nodiscard]] const scheduler::Unit& unit(scheduler::UnitId id) const {
    return plan.units[id.value()];
  }
  [[nodiscard]] const scheduler::Parameter& parameter(scheduler::UnitId id) const {
    return inputs.layout.parameters[unit(id).parameter];
  }
  [[nodiscard]] bool owns(scheduler::UnitId id) const { return unit(id).owner == program.lane; }
  [[nodiscard]] const scheduler::StagedUnit& staged(scheduler::UnitId id) const {
    return program.staged[staged_index[id.value()]];
  }
  [[nodiscard]] bool is_local(const scheduler::Fragment& fragment) const {
    return local[fragment.rank.value()];
  }
};

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_LANE_JOB_H_
