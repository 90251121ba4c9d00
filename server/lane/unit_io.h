// Reads and writes the state of single units: for state_dict, load_state_dict and other nodes.
// Threads: the lane's dispatching thread.
#ifndef DMUOND_SERVER_LANE_UNIT_IO_H_
#define DMUOND_SERVER_LANE_UNIT_IO_H_

#include "absl/status/status.h"
#include "dmuond/v1/trainer.pb.h"
#include "kernels/device.h"
#include "server/lane/lane_job.h"
#include "server/lane/slots.h"

namespace dmuond::server::lane {

// Copies one state tensor of an owned unit into host memory `fd` (fp32, the unit's box row-major;
// STATE_KIND_STEP: one fp64 number, the updates applied). NOT_FOUND: the unit has no state or is
// not owned here. INVALID_ARGUMENT: a kind that the unit does not have, or memory that is too
// small.
absl::Status ReadUnit(const LaneJob& job, const Slots& slots, kernels::Device& device,
                      kernels::Stream& stream, int32_t unit, v1::StateKind kind, int fd);

// Maps `fd`, which has room for a matrix's master twice. Errors as ReadUnit(): a unit that is not a
// matrix is INVALID_ARGUMENT.
absl::StatusOr<std::unique_ptr<kernels::Mapping>> MapForUpdate(const LaneJob& job, int32_t unit,
                                                               int fd);

// Copies one state tensor from `fd` into a free slot, which then becomes current. Tensors of other
// kinds keep their values, or are zero if the unit had no state. The step of the entry stays.
absl::Status WriteUnit(const LaneJob& job, Slots& slots, kernels::Device& device,
                       kernels::Stream& stream, int32_t unit, v1::StateKind kind, int fd);

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_UNIT_IO_H_
