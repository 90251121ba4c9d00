// What a lane knows and holds of its job: its program, and the daemon's memory, mapped.
#ifndef DMUOND_SERVER_LANE_LANE_JOB_H_
#define DMUOND_SERVER_LANE_LANE_JOB_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "dmuond/v1/lane.pb.h"
#include "kernels/device.h"
#include "kernels/ops.h"
#include "scheduler/lane_program.h"
#include "server/storage/host_copy.h"

namespace dmuond::server::lane {

// Immutable after Make(); at a fixed place, so that others may point into it.
struct LaneJob {
  std::string name;
  uint32_t epoch = 0;
  scheduler::LaneProgram program;
  std::vector<kernels::MuonConfig> configs;   // per group
  std::vector<bool> local;                    // per rank: on this node
  bool has_trainers = false;                  // any of them
  std::unique_ptr<kernels::Mapping> state;    // null: the lane owns nothing
  std::unique_ptr<kernels::Mapping> staging;  // null: nothing to stage
  std::unique_ptr<kernels::Mapping> table;
  std::unique_ptr<kernels::Mapping> board;
  storage::HostCopy host_copy;                    // how state lies in host_memory
  std::unique_ptr<kernels::Mapping> host_memory;  // null: no snapshots, or nothing owned
  int64_t snapshot_staging_bytes = 0;

  // Reads the program, checks it, maps. `fds`: as Configure says. INVALID_ARGUMENT says what of
  // the program cannot be followed, or names both sizes of a memory.
  static absl::StatusOr<std::unique_ptr<LaneJob>> Make(const v1::LaneCommand::Configure& configure,
                                                       const std::vector<wire::UniqueFd>& fds,
                                                       kernels::Device& device);

  [[nodiscard]] int32_t buckets() const { return program.buckets(); }
  // Any number is allowed here, of owned units alone elsewhere.
  [[nodiscard]] bool owns(scheduler::UnitId id) const { return own_.contains(id.value()); }
  // Into program.staged.
  [[nodiscard]] int32_t staged_index(scheduler::UnitId id) const {
    return own_.find(id.value())->second.staged;
  }
  [[nodiscard]] const scheduler::StagedUnit& staged(scheduler::UnitId id) const {
    return program.staged[staged_index(id)];
  }
  [[nodiscard]] const scheduler::LaneUnit& lane_unit(scheduler::UnitId id) const {
    return program.units[own_.find(id.value())->second.unit];
  }
  [[nodiscard]] const scheduler::Unit& unit(scheduler::UnitId id) const {
    return lane_unit(id).unit;
  }
  [[nodiscard]] const scheduler::LaneParameter& parameter(scheduler::UnitId id) const {
    return program.parameters[own_.find(id.value())->second.parameter];
  }

 private:
  struct Place {  // of an owned unit in the program's lists
    int32_t staged = 0;
    int32_t unit = 0;
    int32_t parameter = 0;
  };
  absl::Status ReadProgram(const v1::LaneCommand::Configure& configure);

  absl::flat_hash_map<int32_t, Place> own_;  // by UnitId
};

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_LANE_JOB_H_
