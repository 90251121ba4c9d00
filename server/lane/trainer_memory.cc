#include "server/lane/trainer_memory.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/cpu/cpu_memory.h"

namespace dmuond::server::lane {
namespace {

kernels::HandleMemory HandleOf(const v1::Arena& arena) {
  const v1::Arena::CudaIpc& ipc = arena.cuda_ipc();
  return {.handle = ipc.handle(),
          .device_uuid = ipc.device_uuid(),
          .offset = ipc.base_offset(),
          .bytes = static_cast<size_t>(arena.size_bytes()),
          .buffer = ipc.buffer_id(),
          .generation = ipc.generation()};
}

}  // namespace

TrainerMemory::TrainerMemory(const LaneJob& job, kernels::Device& device)
    : job_(job), device_(device), by_rank_(job.local.size()) {}

absl::Status TrainerMemory::Attach(const v1::LaneCommand::AttachTrainer& attach,
                                   const std::vector<wire::UniqueFd>& fds) {
  const int32_t rank = attach.rank();
  if (rank < 0 || rank >= static_cast<int32_t>(by_rank_.size()) || !job_.local[rank]) {
    return absl::InvalidArgumentError(absl::StrCat("trainer ", rank, " is not of this node"));
  }
  if (by_rank_[rank] != nullptr && by_rank_[rank]->incarnation >= attach.incarnation()) {
    return absl::FailedPreconditionError(absl::StrCat("trainer ", rank, ": incarnation ",
                                                      attach.incarnation(), " is not newer than ",
                                                      by_rank_[rank]->incarnation));
  }
  const auto with_descriptor =
      std::count_if(attach.arenas().begin(), attach.arenas().end(),
                    [](const v1::Arena& arena) { return !arena.has_cuda_ipc(); });
  if (static_cast<int64_t>(fds.size()) != with_descriptor + 1) {
    return absl::InvalidArgumentError(absl::StrCat("trainer ", rank, ": ", fds.size(),
                                                   " descriptors for ", with_descriptor,
                                                   " arenas and a timeline"));
  }
  if (attach.buckets() != static_cast<uint32_t>(job_.buckets()) ||
      attach.timeline_bytes() < static_cast<int64_t>(wire::TimelineBytes(attach.buckets()))) {
    return absl::InvalidArgumentError(
        absl::StrCat("trainer ", rank, ": a timeline of ", attach.buckets(), " buckets and ",
                     attach.timeline_bytes(), " bytes; the plan has ", job_.buckets(), " buckets"));
  }
  auto trainer = std::make_unique<Trainer>();
  trainer->rank = rank;
  trainer->incarnation = attach.incarnation();
  trainer->buckets = attach.buckets();
  trainer->poison_parameters = attach.poison_parameters();
  auto fd = fds.begin();
  for (const v1::Arena& arena : attach.arenas()) {
    const auto bytes = static_cast<size_t>(arena.size_bytes());
    auto mapping = arena.has_cuda_ipc() ? device_.MapHandle(HandleOf(arena))
                                        : device_.Map((fd++)->get(), bytes);
    if (!mapping.ok()) {
      return absl::Status(mapping.status().code(),
                          absl::StrCat("arena ", arena.id(), ": ", mapping.status().message()));
    }
    trainer->arenas.push_back({arena.id(), *std::move(mapping)});
  }
  // The page is host memory on every device.
  ASSIGN_OR_RETURN(trainer->timeline, kernels::cpu::MapShared(
                                          fd->get(), static_cast<size_t>(attach.timeline_bytes())));
  trainer->page = wire::TimelinePage(trainer->timeline->data());
  RETURN_IF_ERROR(CheckSlices(rank, *trainer));
  by_rank_[rank] = std::move(trainer);
  const auto place = std::lower_bound(attached_.begin(), attached_.end(), rank);
  if (place == attached_.end() || *place != rank) attached_.insert(place, rank);
  return absl::OkStatus();
}

absl::Status TrainerMemory::CheckSlices(int32_t rank, const Trainer& trainer) const {
  const auto check = [&](const scheduler::Fragment& fragment, const scheduler::Slice& slice,
                         scheduler::ElementType type) -> absl::Status {
    const std::string& name = job_.program.FindParameter(fragment.parameter)->name;
    int64_t end = 0;
    RETURN_IF_ERROR(scheduler::SliceEnd(slice, fragment.box, type, end));
    for (const Trainer::ArenaMap& arena : trainer.arenas) {
      if (arena.id != slice.arena) continue;
      if (slice.offset_bytes >= 0 && end <= static_cast<int64_t>(arena.mapping->size())) {
        return absl::OkStatus();
      }
      return absl::InvalidArgumentError(absl::StrCat(
          "trainer ", rank, ", parameter \"", name, "\": a slice from byte ", slice.offset_bytes,
          " to ", end, " of arena ", arena.id, ", which has ", arena.mapping->size(), " bytes"));
    }
    return absl::InvalidArgumentError(absl::StrCat("trainer ", rank, ", parameter \"", name,
                                                   "\": arena ", slice.arena, " is not attached"));
  };
  for (const scheduler::Fragment& fragment : job_.program.fragments) {
    if (fragment.rank.value() != rank) continue;
    const scheduler::LaneParameter& parameter = *job_.program.FindParameter(fragment.parameter);
    absl::Status status = check(fragment, fragment.gradient, parameter.gradient_type);
    if (status.ok()) status = check(fragment, fragment.weight, parameter.weight_type);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

void TrainerMemory::Detach(int32_t rank, uint64_t incarnation) {
  if (rank < 0 || rank >= static_cast<int32_t>(by_rank_.size())) return;
  if (by_rank_[rank] == nullptr || by_rank_[rank]->incarnation > incarnation) return;
  by_rank_[rank].reset();
  attached_.erase(std::find(attached_.begin(), attached_.end(), rank));
}

void TrainerMemory::OnGone(int32_t rank, uint64_t incarnation) {
  if (rank < 0 || rank >= static_cast<int32_t>(by_rank_.size())) return;
  if (by_rank_[rank] == nullptr || by_rank_[rank]->incarnation > incarnation) return;
  by_rank_[rank]->gone = true;
}

bool TrainerMemory::IsThrough(int32_t rank, scheduler::Attempt attempt) const {
  const Trainer* trainer = Find(rank);
  return trainer == nullptr || trainer->gone || Reached(trainer->page.submitted(), attempt.value());
}

std::byte* TrainerMemory::Address(int32_t rank, uint32_t arena, int64_t offset_bytes) const {
  const Trainer* trainer = Find(rank);
  if (trainer == nullptr) return nullptr;
  for (const Trainer::ArenaMap& map : trainer->arenas) {
    if (map.id == arena) return map.mapping->data() + offset_bytes;
  }
  return nullptr;
}

}  // namespace dmuond::server::lane
