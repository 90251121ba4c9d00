// Names of tensors in snapshot files.
//
//   layers.0.wq.weight/momentum                 the whole parameter
//   embedding.weight/exp_avg[0:32000,0:4096]    a box of it
//   embedding.weight/updates[0:32000,0:4096]    how many updates that box has had: one I64
//   trainer_state/17                            what rank 17 gave with the step: U8
#ifndef DMUOND_SERVER_STORAGE_TENSOR_NAME_H_
#define DMUOND_SERVER_STORAGE_TENSOR_NAME_H_

#include <array>
#include <optional>
#include <span>
#include <string>

#include "scheduler/box.h"
#include "scheduler/unit.h"

namespace dmuond::server::storage {

enum class StateTensor : uint8_t { kMaster = 1, kMomentum, kExpAvg, kExpAvgSq, kUpdates };
[[nodiscard]] const char* Name(StateTensor kind);  // "master", "momentum", …

// The fp32 tensors of a unit, in the order of its slot's memory and of a snapshot's file.
[[nodiscard]] std::span<const StateTensor> TensorsOf(scheduler::UnitKind kind);

struct TensorName {
  std::string parameter;
  StateTensor kind = StateTensor::kMaster;
  std::optional<scheduler::Box> box;  // nothing: all of the parameter
  bool operator==(const TensorName&) const = default;
};

[[nodiscard]] std::string TensorNameOf(const std::string& parameter,
                                       const scheduler::Extents& parameter_shape, StateTensor kind,
                                       const scheduler::Box& box);
// nullopt: the text is no such name. Boxes are well-formed (0 <= begin < end) and otherwise
// unchecked.
[[nodiscard]] std::optional<TensorName> ParseTensorName(const std::string& name);

}  // namespace dmuond::server::storage

#endif  // DMUOND_SERVER_STORAGE_TENSOR_NAME_H_
