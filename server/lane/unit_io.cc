#include "server/lane/unit_io.h"

#include <sys/stat.h>

#include <cmath>
#include <cstring>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/cpu/cpu_memory.h"
#include "server/lane/strided.h"

namespace dmuond::server::lane {
namespace {

using scheduler::UnitId;

constexpr int32_t kStepValue = -1;  // not a tensor

absl::StatusOr<int32_t> TensorOf(const scheduler::Unit& unit, v1::StateKind kind) {
  const bool matrix = unit.kind == scheduler::UnitKind::kMatrix;
  switch (kind) {
    case v1::STATE_KIND_STEP:
      return kStepValue;
    case v1::STATE_KIND_MASTER:
      return matrix ? 1 : 2;
    case v1::STATE_KIND_MOMENTUM:
      if (matrix) return 0;
      break;
    case v1::STATE_KIND_EXP_AVG:
      if (!matrix) return 0;
      break;
    case v1::STATE_KIND_EXP_AVG_SQ:
      if (!matrix) return 1;
      break;
    default:
      break;
  }
  return absl::InvalidArgumentError(absl::StrCat("unit ", unit.id.value(), ", a ",
                                                 matrix ? "matrix" : "piece",
                                                 ", has no state of kind ", kind));
}

absl::StatusOr<UnitId> OwnedUnit(const LaneJob& job, int32_t unit) {
  if (job.owns(UnitId(unit))) return UnitId(unit);
  return absl::NotFoundError(
      absl::StrCat("unit ", unit, " is not owned by lane ", job.program.lane.value()));
}

absl::StatusOr<std::unique_ptr<kernels::Mapping>> MapHost(int fd, int64_t bytes) {
  struct stat status {};
  if (::fstat(fd, &status) != 0 || status.st_size < bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("memory of ", status.st_size, " bytes for ", bytes, " bytes of state"));
  }
  return kernels::cpu::MapShared(fd, static_cast<size_t>(bytes));
}

int64_t BytesOf(const scheduler::Unit& unit, int32_t tensor) {
  return tensor == kStepValue ? static_cast<int64_t>(sizeof(double)) : unit.rows * unit.cols * 4;
}

}  // namespace

absl::Status ReadUnit(const LaneJob& job, const Slots& slots, kernels::Device& device,
                      kernels::Stream& stream, int32_t unit_id, v1::StateKind kind, int fd) {
  ASSIGN_OR_RETURN(UnitId id, OwnedUnit(job, unit_id));
  const scheduler::Unit& unit = job.unit(id);
  ASSIGN_OR_RETURN(int32_t tensor, TensorOf(unit, kind));
  const StateView state = slots.Current(id);
  if (!state.exists()) return absl::NotFoundError(absl::StrCat("unit ", unit_id, " has no state"));
  ASSIGN_OR_RETURN(auto memory, MapHost(fd, BytesOf(unit, tensor)));
  if (tensor == kStepValue) {
    const auto updates = static_cast<double>(state.updates);
    std::memcpy(memory->data(), &updates, sizeof(updates));
    return absl::OkStatus();
  }
  const int64_t elements = unit.rows * unit.cols;
  absl::Status status =
      device.ops().Copy(stream, Flat(memory->data(), kernels::DType::kF32, elements),
                        Flat(slots.Tensor(id, state.slot, tensor), kernels::DType::kF32, elements));
  return status.ok() ? stream.Synchronize() : status;
}

absl::StatusOr<std::unique_ptr<kernels::Mapping>> MapForUpdate(const LaneJob& job, int32_t unit_id,
                                                               int fd) {
  ASSIGN_OR_RETURN(UnitId id, OwnedUnit(job, unit_id));
  const scheduler::Unit& unit = job.unit(id);
  if (unit.kind != scheduler::UnitKind::kMatrix) {
    return absl::InvalidArgumentError(absl::StrCat("unit ", unit_id, " is not a matrix"));
  }
  return MapHost(fd, 2 * unit.rows * unit.cols * 4);
}

absl::Status WriteUnit(const LaneJob& job, Slots& slots, kernels::Device& device,
                       kernels::Stream& stream, int32_t unit_id, v1::StateKind kind, int fd) {
  ASSIGN_OR_RETURN(UnitId id, OwnedUnit(job, unit_id));
  const scheduler::Unit& unit = job.unit(id);
  ASSIGN_OR_RETURN(int32_t tensor, TensorOf(unit, kind));
  ASSIGN_OR_RETURN(auto memory, MapHost(fd, BytesOf(unit, tensor)));
  const StateView state = slots.Current(id);
  uint64_t updates = state.updates;
  if (tensor == kStepValue) {
    double value = 0;
    std::memcpy(&value, memory->data(), sizeof(value));
    if (!(value >= 0) || value > 0x1p53 || value != std::floor(value)) {
      return absl::InvalidArgumentError(absl::StrCat("unit ", unit_id, ": ", value, " updates"));
    }
    updates = static_cast<uint64_t>(value);
  }
  ASSIGN_OR_RETURN(int32_t slot, slots.TakeFree(id));
  const int64_t elements = unit.rows * unit.cols;
  const auto flat = [&](void* data) { return Flat(data, kernels::DType::kF32, elements); };
  absl::Status status;
  for (int32_t t = 0; t < slots.tensors(id) && status.ok(); ++t) {
    const kernels::StridedBox to = flat(slots.Tensor(id, slot, t));
    if (t == tensor) {
      status = device.ops().Copy(stream, to, flat(memory->data()));
    } else if (state.exists()) {
      status = device.ops().Copy(stream, to, flat(slots.Tensor(id, state.slot, t)));
    } else {
      status = device.ops().Fill(stream, to, 0.0F);
    }
  }
  if (status.ok()) status = stream.Synchronize();
  if (!status.ok()) return status;
  // A trainer's own weights are the trainer's business.
  if (kind == v1::STATE_KIND_MASTER) slots.SetNonFinite(id, scheduler::StepId());
  slots.Flip(id, slot, state.step, updates);
  return absl::OkStatus();
}

}  // namespace dmuond::server::lane
