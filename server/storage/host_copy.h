// How a lane's state lies in the host copy from which a snapshot is written: in the order of the
// lane's updates and of its file, so that what a lane has copied after a batch is what the writer
// appends next. Lane and daemon each compute the same. Pure.
//
//   lane, after batch b:
//     copies the tensors of slot i to memory + copy.unit_offset_bytes[i], and reports batch b
//   daemon, then:
//     appends memory[copy.batch_offset_bytes[b], copy.batch_offset_bytes[b + 1]) to the file
#ifndef DMUOND_SERVER_STORAGE_HOST_COPY_H_
#define DMUOND_SERVER_STORAGE_HOST_COPY_H_

#include <cstdint>
#include <vector>

#include "scheduler/lane_program.h"
#include "scheduler/types.h"

namespace dmuond::server::storage {

struct HostCopy {
  std::vector<scheduler::UnitId> units;     // StateUnitsOf(…, units) declares them to the file
  std::vector<int64_t> unit_offset_bytes;   // per entry of `units`: its first tensor; the others
                                            // follow without gaps, in the order of TensorsOf()
  std::vector<int64_t> batch_offset_bytes;  // per batch of the program, and the end of the last
  [[nodiscard]] int64_t bytes() const { return batch_offset_bytes.back(); }
};

[[nodiscard]] HostCopy PlaceHostCopy(const scheduler::LaneProgram& program);

}  // namespace dmuond::server::storage

#endif  // DMUOND_SERVER_STORAGE_HOST_COPY_H_
