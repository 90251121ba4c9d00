#include "server/storage/host_copy.h"

#include "server/storage/tensor_name.h"

namespace dmuond::server::storage {

HostCopy PlaceHostCopy(const scheduler::LaneProgram& program) {
  HostCopy copy;
  int64_t at = 0;
  copy.batch_offset_bytes.push_back(0);
  for (const scheduler::Batch& batch : program.batches) {
    for (scheduler::UnitId id : batch.units) {
      const scheduler::Unit& unit = program.Find(id)->unit;
      copy.units.push_back(id);
      copy.unit_offset_bytes.push_back(at);
      at += scheduler::Elements(unit.box) * static_cast<int64_t>(sizeof(float)) *
            static_cast<int64_t>(TensorsOf(unit.kind).size());
    }
    copy.batch_offset_bytes.push_back(at);
  }
  return copy;
}

}  // namespace dmuond::server::storage
