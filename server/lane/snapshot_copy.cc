#include "server/lane/snapshot_copy.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/status_macros.h"
#include "server/lane/strided.h"

namespace dmuond::server::lane {
namespace {

using scheduler::UnitId;

// One chunk delays the lane's thread by about a millisecond where copies are its own work.
constexpr int64_t kChunkBytes = int64_t{4} << 20;
constexpr size_t kPlacesStraight = 4;

int64_t TensorBytes(const scheduler::Unit& unit) {
  return scheduler::Elements(unit.box) * static_cast<int64_t>(sizeof(float));
}

}  // namespace

absl::StatusOr<std::unique_ptr<SnapshotCopy>> SnapshotCopy::Create(const LaneJob& job,
                                                                   const Slots& slots,
                                                                   kernels::Device& device,
                                                                   kernels::Stream& stream) {
  std::unique_ptr<SnapshotCopy> copy(new SnapshotCopy(job, slots, device, stream));
  if (job.host_memory == nullptr) return copy;
  size_t places = kPlacesStraight;
  if (job.snapshot_staging_bytes > 0) {
    const int64_t wanted = std::min(job.snapshot_staging_bytes, job.host_copy.bytes());
    places = static_cast<size_t>(std::max<int64_t>(1, (wanted + kChunkBytes - 1) / kChunkBytes));
    ASSIGN_OR_RETURN(copy->ring_, device.AllocateHost(places * kChunkBytes));
  }
  for (size_t i = 0; i < places; ++i) {
    ASSIGN_OR_RETURN(auto event, device.CreateEvent());
    copy->events_.push_back(std::move(event));
  }
  copy->slot_.resize(job.host_copy.units.size());
  return copy;
}

absl::Status SnapshotCopy::Start(std::vector<uint64_t>& updates) {
  if (active_) return absl::FailedPreconditionError("a snapshot is being copied already");
  updates.clear();
  const std::vector<UnitId>& units = job_.host_copy.units;
  for (size_t i = 0; i < units.size(); ++i) {
    const StateView state = slots_.Current(units[i]);
    if (!state.exists()) {
      return absl::FailedPreconditionError(
          absl::StrCat("unit ", units[i].value(), " has no state to be saved"));
    }
    slot_[i] = state.slot;
    updates.push_back(state.updates);
  }
  active_ = job_.host_memory != nullptr;
  next_unit_ = 0;
  started_ = left_ = 0;
  batches_ = active_ ? 0 : static_cast<int32_t>(job_.program.batches.size());
  return absl::OkStatus();
}

absl::StatusOr<bool> SnapshotCopy::Progress() {
  if (!active_) return false;
  if (!flying_.empty()) {
    ASSIGN_OR_RETURN(bool done, events_[flying_.front().place]->Done());
    if (done) {
      const Chunk chunk = flying_.front();
      flying_.pop_front();
      left_ = chunk.end;
      if (ring_ == nullptr) {
        Deliver(chunk);
      } else {
        ringed_.push_back(chunk);
      }
      return true;
    }
  }
  if (started_ < job_.host_copy.bytes() && flying_.size() + ringed_.size() < events_.size()) {
    RETURN_IF_ERROR(StartChunk());
    return true;
  }
  if (ringed_.empty()) return false;
  const Chunk chunk = ringed_.front();
  ringed_.pop_front();
  std::memcpy(job_.host_memory->data() + chunk.begin, ring_->data() + (chunk.place * kChunkBytes),
              chunk.end - chunk.begin);
  Deliver(chunk);
  return true;
}

void SnapshotCopy::Deliver(const Chunk& chunk) {
  const std::vector<int64_t>& offsets = job_.host_copy.batch_offset_bytes;
  while (static_cast<size_t>(batches_) + 1 < offsets.size() && offsets[batches_ + 1] <= chunk.end) {
    ++batches_;
  }
  active_ = chunk.end < job_.host_copy.bytes();
}

absl::Status SnapshotCopy::Leave() {
  while (active_ && left_ < job_.host_copy.bytes()) {
    ASSIGN_OR_RETURN(bool progress, Progress());
    if (progress) continue;
    RETURN_IF_ERROR(stream_.Synchronize());
  }
  return absl::OkStatus();
}

// As many consecutive tensors, or parts of one, as a chunk holds.
absl::Status SnapshotCopy::StartChunk() {
  fault::FaultPoint("lane.snapshot.copy");
  Chunk chunk{.begin = started_,
              .end = std::min(started_ + kChunkBytes, job_.host_copy.bytes()),
              .place = next_place_};
  next_place_ = (next_place_ + 1) % events_.size();
  std::byte* to = ring_ == nullptr ? job_.host_memory->data() + chunk.begin
                                   : ring_->data() + (chunk.place * kChunkBytes);
  absl::Status status = CopyPart(chunk.begin, chunk.end, to);
  if (status.ok()) status = stream_.Record(*events_[chunk.place]);
  started_ = chunk.end;
  flying_.push_back(chunk);
  return status;
}

absl::Status SnapshotCopy::CopyPart(int64_t begin, int64_t end, std::byte* to) {
  const storage::HostCopy& layout = job_.host_copy;
  for (int64_t at = begin; at < end;) {
    const UnitId id = layout.units[next_unit_];
    const int64_t tensor_bytes = TensorBytes(job_.unit(id));
    const int64_t in_unit = at - layout.unit_offset_bytes[next_unit_];
    const auto tensor = static_cast<int32_t>(in_unit / tensor_bytes);
    if (tensor == slots_.tensors(id)) {
      ++next_unit_;
      continue;
    }
    const int64_t in_tensor = in_unit % tensor_bytes;
    const int64_t bytes = std::min(tensor_bytes - in_tensor, end - at);
    const int64_t elements = bytes / static_cast<int64_t>(sizeof(float));
    float* from = slots_.Tensor(id, slot_[next_unit_], tensor) +
                  (in_tensor / static_cast<int64_t>(sizeof(float)));
    RETURN_IF_ERROR(device_.ops().Copy(stream_,
                                       Flat(to + (at - begin), kernels::DType::kF32, elements),
                                       Flat(from, kernels::DType::kF32, elements)));
    at += bytes;
  }
  return absl::OkStatus();
}

absl::Status LoadHostCopy(const LaneJob& job, Slots& slots, kernels::Device& device,
                          kernels::Stream& stream, scheduler::StepId step,
                          const std::vector<uint64_t>& updates) {
  const std::vector<UnitId>& units = job.host_copy.units;
  if (updates.size() != units.size()) {
    return absl::InvalidArgumentError(absl::StrCat("numbers of updates of ", updates.size(),
                                                   " units for ", units.size(), " units"));
  }
  for (size_t i = 0; i < units.size(); ++i) {
    ASSIGN_OR_RETURN(int32_t slot, slots.TakeFree(units[i]));
    const int64_t bytes = TensorBytes(job.unit(units[i]));
    const int64_t elements = bytes / static_cast<int64_t>(sizeof(float));
    absl::Status status;
    for (int32_t t = 0; t < slots.tensors(units[i]) && status.ok(); ++t) {
      std::byte* from = job.host_memory->data() + job.host_copy.unit_offset_bytes[i] + (t * bytes);
      status = device.ops().Copy(
          stream, Flat(slots.Tensor(units[i], slot, t), kernels::DType::kF32, elements),
          Flat(from, kernels::DType::kF32, elements));
    }
    // A slot counts when it is complete.
    if (status.ok()) status = stream.Synchronize();
    if (!status.ok()) return status;
    slots.SetNonFinite(units[i], scheduler::StepId());
    slots.Flip(units[i], slot, step, updates[i]);
  }
  return absl::OkStatus();
}

}  // namespace dmuond::server::lane
