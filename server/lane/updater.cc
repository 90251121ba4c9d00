#include "server/lane/updater.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/status_macros.h"
#include "scheduler/convert/convert.h"
#include "server/lane/strided.h"
#include "server/lane/timing.h"

namespace dmuond::server::lane {

using scheduler::AttemptKind;
using scheduler::Batch;
using scheduler::UnitId;
using scheduler::UnitKind;

absl::StatusOr<std::unique_ptr<Updater>> Updater::Create(const LaneJob& job, Slots& slots,
                                                         kernels::Device& device,
                                                         kernels::Stream& stream) {
  std::unique_ptr<Updater> updater(new Updater(job, slots, device, stream));
  size_t workspace_bytes = 0;
  size_t units = 0;
  size_t matrices = 0;
  for (const Batch& batch : job.program.batches) {
    units = std::max(units, batch.units.size());
    if (batch.kind != UnitKind::kMatrix) continue;
    matrices += batch.units.size();
    const size_t bytes = device.ops().MuonWorkspaceBytes(
        batch.rows, batch.cols, static_cast<int64_t>(batch.units.size()), job.configs[batch.group]);
    workspace_bytes = std::max(workspace_bytes, bytes);
  }
  if (workspace_bytes > 0) {
    ASSIGN_OR_RETURN(updater->workspace_, device.AllocateScratch(workspace_bytes));
  }
  updater->places_.reserve(units);
  updater->updates_.reserve(matrices);
  if (units > 0) {
    ASSIGN_OR_RETURN(updater->scalars_memory_,
                     device.AllocateHost(units * sizeof(kernels::UpdateScalars)));
    updater->scalars_ = reinterpret_cast<kernels::UpdateScalars*>(updater->scalars_memory_->data());
    ASSIGN_OR_RETURN(updater->told_memory_, device.AllocateHost(units * sizeof(Told)));
    updater->told_ = reinterpret_cast<Told*>(updater->told_memory_->data());
  }
  ASSIGN_OR_RETURN(updater->event_, device.CreateEvent());
  updater->matrices_args_.reserve(units);
  updater->pieces_args_.reserve(units);
  for (const Batch& batch : job.program.batches) {
    if (batch.kind != UnitKind::kMatrix) continue;
    updater->matrices_args_.resize(batch.units.size());
    RETURN_IF_ERROR(device.ops().PrepareMuon(stream, updater->ToMuon(batch), updater->Workspace()));
  }
  updater->matrices_args_.clear();
  updater->next_batch_ = job.program.batches.size();
  return updater;
}

void Updater::Start(const scheduler::Decision& decision) {
  decision_ = &decision;
  next_batch_ = 0;
  matrices_ = 0;
  updates_.clear();
}

void Updater::StartRefresh() {
  decision_ = nullptr;
  next_batch_ = 0;
  matrices_ = 0;
  updates_.clear();
}

absl::Status Updater::StartBatch(const Batch& batch) {
  places_.clear();
  absl::Status status;
  if (decision_ == nullptr) {
    for (UnitId id : batch.units) {
      const StateView state = slots_.Current(id);
      if (!state.exists()) {
        return absl::FailedPreconditionError(
            absl::StrCat("unit ", id.value(), " has no state to publish"));
      }
      status.Update(Refresh(id, state.slot));
    }
  } else if (decision_->kind == AttemptKind::kPush) {
    status = Push(batch);
  } else {
    status = Step(batch);
  }
  if (status.ok()) status = stream_.Record(*event_);
  return status;
}

absl::Status Updater::BeginBatch() {
  fault::FaultPoint("lane.update.before_batch");
  running_ = true;
  return StartBatch(job_.program.batches[next_batch_]);
}

absl::StatusOr<const Batch*> Updater::RunBatch() {
  const Batch& batch = job_.program.batches[next_batch_];
  if (!running_) {
    RETURN_IF_ERROR(BeginBatch());
  }
  ASSIGN_OR_RETURN(bool complete, event_->Done());
  if (!complete) return nullptr;
  running_ = false;
  fault::FaultPoint("lane.update.before_flip");
  for (const Place& place : places_) {
    if (to_copy_.memory == nullptr || place.unit != to_copy_.unit || place.told == nullptr)
      continue;
    RETURN_IF_ERROR(CopyMasters(place));
  }
  for (const Place& place : places_) {
    bool finite = true;
    if (place.told != nullptr) {
      // A device that does not look at weights knows those by what they were updated with.
      finite = place.told->non_finite == 0 && std::isfinite(place.told->update_squares);
      if (batch.kind == UnitKind::kMatrix) {
        updates_.push_back({place.unit, place.told->update_squares});
      }
    }
    slots_.SetNonFinite(place.unit, finite ? scheduler::StepId() : place.step);
    slots_.Flip(place.unit, place.slot, place.step, place.updates);
    fault::FaultPoint("lane.update.flip");
  }
  fault::FaultPoint("lane.update.after_flip");
  ++next_batch_;
  return &batch;
}

absl::Status Updater::CopyMasters(const Place& place) {
  const Clock::time_point began = Clock::now();
  const scheduler::Unit& unit = job_.unit(place.unit);
  const int64_t elements = unit.rows * unit.cols;
  auto* const to = reinterpret_cast<float*>(to_copy_.memory->data());
  const int32_t before = slots_.Current(place.unit).slot;
  for (const auto& [slot, at] : {std::pair{before, to}, std::pair{place.slot, to + elements}}) {
    RETURN_IF_ERROR(
        device_.ops().Copy(stream_, Flat(at, kernels::DType::kF32, elements),
                           Flat(slots_.Master(place.unit, slot), kernels::DType::kF32, elements)));
  }
  RETURN_IF_ERROR(stream_.Synchronize());
  to_copy_ = {};
  const kernels::UpdateScalars& scalars = scalars_[place.told - told_];
  const kernels::MuonConfig& config = job_.configs[job_.parameter(place.unit).group];
  const double scale = kernels::UpdateScale(config.scale, unit.rows, unit.cols);
  copied_ = {.step = place.step,
             .keep = 1 - scalars.learning_rate * scalars.weight_decay,
             .rate = place.told->update_squares == 0 ? 0 : scalars.learning_rate * scale,
             .scale = scale,
             .held_us = Microseconds(began, Clock::now())};
  return absl::OkStatus();
}

kernels::MuonBatch Updater::ToMuon(const Batch& batch) const {
  return {.rows = batch.rows,
          .cols = batch.cols,
          .weight_dtype = ToDType(batch.weight_type),
          .config = &job_.configs[batch.group],
          .matrices = matrices_args_};
}

void* Updater::Workspace() const { return workspace_ == nullptr ? nullptr : workspace_->data(); }

float* Updater::Gradient(UnitId id) const {
  return reinterpret_cast<float*>(job_.staging->data() + job_.staged(id).gradient_offset_bytes);
}

void* Updater::Weight(UnitId id) const {
  return job_.staging->data() + job_.staged(id).weight_offset_bytes;
}

absl::Status Updater::Refresh(UnitId id, int32_t slot) {
  const scheduler::Unit& unit = job_.unit(id);
  const int64_t elements = unit.rows * unit.cols;
  return device_.ops().Copy(stream_,
                            Flat(Weight(id), ToDType(job_.parameter(id).weight_type), elements),
                            Flat(slots_.Master(id, slot), kernels::DType::kF32, elements));
}

// Masters come from staging memory; momentum and moments stay, fresh ones are zero.
absl::Status Updater::Push(const Batch& batch) {
  for (UnitId id : batch.units) {
    const scheduler::Unit& unit = job_.unit(id);
    const int64_t elements = unit.rows * unit.cols;
    const StateView state = slots_.Current(id);
    const bool pushed =
        decision_->pushed.empty() ||
        std::binary_search(decision_->pushed.begin(), decision_->pushed.end(), unit.parameter);
    if (!pushed) {
      if (!state.exists()) {
        return absl::FailedPreconditionError(absl::StrCat(
            "parameter \"", job_.parameter(id).name, "\" has no weights yet and is not pushed"));
      }
      RETURN_IF_ERROR(Refresh(id, state.slot));
      continue;
    }
    ASSIGN_OR_RETURN(int32_t slot, slots_.TakeFree(id));
    const auto flat = [&](float* data) { return Flat(data, kernels::DType::kF32, elements); };
    absl::Status status;
    const int32_t master = slots_.tensors(id) - 1;
    for (int32_t t = 0; t < master && status.ok(); ++t) {
      const kernels::StridedBox to = flat(slots_.Tensor(id, slot, t));
      status = state.exists()
                   ? device_.ops().Copy(stream_, to, flat(slots_.Tensor(id, state.slot, t)))
                   : device_.ops().Fill(stream_, to, 0.0F);
    }
    if (status.ok()) {
      status =
          device_.ops().Copy(stream_, flat(slots_.Tensor(id, slot, master)), flat(Gradient(id)));
    }
    if (status.ok()) status = Refresh(id, slot);
    if (!status.ok()) return status;
    places_.push_back({id, slot, state.updates, state.step});
  }
  return absl::OkStatus();
}

bool Updater::Active(UnitId id) const {
  if (decision_->absent.empty()) return true;
  const scheduler::LaneUnit& of = job_.lane_unit(id);
  for (const scheduler::LaneCell& cell : of.cells) {
    for (const scheduler::CellLeaf& leaf : cell.leaves) {
      const scheduler::AbsentFragment fragment{leaf.rank, of.unit.parameter};
      if (std::find(decision_->absent.begin(), decision_->absent.end(), fragment) ==
          decision_->absent.end()) {
        return true;
      }
    }
  }
  return false;
}

kernels::UpdateScalars Updater::ScalarsOf(UnitId id, uint64_t updates) const {
  const scheduler::GroupScalars& group = decision_->scalars.groups[job_.parameter(id).group];
  kernels::UpdateScalars scalars;
  scalars.learning_rate = group.learning_rate;
  scalars.momentum = group.momentum;
  scalars.weight_decay = group.weight_decay;
  const bool clips = job_.unit(id).kind == UnitKind::kPiece || decision_->scalars.clip_muon;
  scalars.gradient_factor = clips ? decision_->clip_coefficient : 1;
  scalars.beta1 = group.beta1;
  scalars.beta2 = group.beta2;
  scalars.eps = group.eps;
  const auto t = static_cast<double>(updates);
  scalars.bias_correction1 = 1 - std::pow(group.beta1, t);
  scalars.bias_correction2 = 1 - std::pow(group.beta2, t);
  scalars.active = Active(id) ? 1 : 0;
  return scalars;
}

absl::Status Updater::Step(const Batch& batch) {
  scalars_used_ = 0;
  matrices_args_.clear();
  pieces_args_.clear();
  for (UnitId id : batch.units) {
    const StateView state = slots_.Current(id);
    if (!state.exists()) {
      return absl::FailedPreconditionError(
          absl::StrCat("step ", decision_->step.value(), ": parameter \"", job_.parameter(id).name,
                       "\" has no weights yet; they come with PushParameters"));
    }
    if (state.step >= decision_->step) {  // by a lane that ended before this one
      RETURN_IF_ERROR(Refresh(id, state.slot));
      continue;
    }
    if (static_cast<size_t>(job_.parameter(id).group) >= decision_->scalars.groups.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("step ", decision_->step.value(), ": scalars of ",
                       decision_->scalars.groups.size(), " groups, parameter \"",
                       job_.parameter(id).name, "\" is in group ", job_.parameter(id).group));
    }
    ASSIGN_OR_RETURN(int32_t slot, slots_.TakeFree(id));
    Told& told = told_[scalars_used_];
    told = {};
    kernels::UpdateScalars& scalars = scalars_[scalars_used_++];
    scalars = ScalarsOf(id, state.updates + 1);
    const bool active = scalars.active != 0;
    places_.push_back({id, slot, state.updates + (active ? 1 : 0), decision_->step, &told});
    const scheduler::Unit& unit = job_.unit(id);
    if (batch.kind == UnitKind::kMatrix) {
      matrices_ += active ? 1 : 0;
      matrices_args_.push_back({.gradient = Gradient(id),
                                .momentum_in = slots_.Tensor(id, state.slot, 0),
                                .momentum_out = slots_.Tensor(id, slot, 0),
                                .master_in = slots_.Tensor(id, state.slot, 1),
                                .master_out = slots_.Tensor(id, slot, 1),
                                .weight_out = Weight(id),
                                .scalars = &scalars,
                                .non_finite = &told.non_finite,
                                .update_squares = &told.update_squares});
    } else {
      pieces_args_.push_back({.elements = unit.rows * unit.cols,
                              .weight_dtype = ToDType(job_.parameter(id).weight_type),
                              .gradient = Gradient(id),
                              .m_in = slots_.Tensor(id, state.slot, 0),
                              .m_out = slots_.Tensor(id, slot, 0),
                              .v_in = slots_.Tensor(id, state.slot, 1),
                              .v_out = slots_.Tensor(id, slot, 1),
                              .master_in = slots_.Tensor(id, state.slot, 2),
                              .master_out = slots_.Tensor(id, slot, 2),
                              .weight_out = Weight(id),
                              .scalars = &scalars,
                              .non_finite = &told.non_finite});
    }
  }
  if (!matrices_args_.empty()) {
    return device_.ops().UpdateMuon(stream_, ToMuon(batch), Workspace());
  }
  return pieces_args_.empty() ? absl::OkStatus() : device_.ops().UpdateAdamW(stream_, pieces_args_);
}

}  // namespace dmuond::server::lane
