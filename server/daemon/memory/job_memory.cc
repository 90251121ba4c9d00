#include "server/daemon/memory/job_memory.h"

#include <algorithm>
#include <new>

#include "absl/strings/str_cat.h"
#include "server/common/errors.h"

namespace dmuond::server {

using scheduler::LaneIndex;
using scheduler::TrainerRank;

JobMemory::JobMemory(NodeDevice& device, Options options)
    : device_(device), options_(std::move(options)) {}

JobMemory::~JobMemory() { PoisonAll(); }

absl::Status JobMemory::Reserve(int64_t bytes, const std::string& what) {
  if (bytes <= 0) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": ", bytes, " bytes wanted"));
  }
  MutexLock lock(mutex_);
  ReturnKept();
  const int64_t limit = options_.bytes_max;
  if (limit > 0 && (bytes > limit || bytes_ > limit - bytes)) {
    return Error(absl::StatusCode::kResourceExhausted, "MEMORY_EXHAUSTED",
                 Say(what, ": ", Named("wanted_bytes", bytes), " bytes wanted, job ",
                     Named("job", options_.job), " holds ", Named("held_bytes", bytes_),
                     " of at most ", Named("limit_bytes", limit), " (--job_memory_bytes)"));
  }
  bytes_ += bytes;
  return absl::OkStatus();
}

absl::StatusOr<JobMemory::Block> JobMemory::Make(kernels::MemoryHolder& holder, int64_t bytes,
                                                 const std::string& what) {
  Block block;
  block.bytes = bytes;
  const auto asked = static_cast<size_t>(std::max<int64_t>(bytes, 0));
  block.taken_bytes = std::max(bytes, static_cast<int64_t>(holder.Rounded(asked)));
  if (absl::Status reserved = Reserve(block.taken_bytes, what); !reserved.ok()) return reserved;
  // Without the lock: filling gigabytes of pages takes seconds.
  absl::StatusOr<wire::UniqueFd> fd =
      holder.Allocate(asked, absl::StrCat("dmuond:", options_.job, ":", what));
  if (!fd.ok()) {
    MutexLock lock(mutex_);
    Return(block);
    return WithMetadata(WithReason(fd.status(), "MEMORY_EXHAUSTED"),
                        {{"wanted_bytes", absl::StrCat(bytes)}});
  }
  block.fd = *std::move(fd);
  return block;
}

absl::StatusOr<JobMemory::Block> JobMemory::MakeHost(int64_t bytes, const std::string& what) {
  absl::StatusOr<Block> block = Make(host_, bytes, what);
  if (!block.ok()) return block;
  absl::StatusOr<std::unique_ptr<kernels::Mapping>> mapping =
      kernels::cpu::MapShared(block->fd.get(), static_cast<size_t>(bytes));
  if (!mapping.ok()) {
    MutexLock lock(mutex_);
    Return(*block);
    return WithMetadata(WithReason(mapping.status(), "MEMORY_EXHAUSTED"),
                        {{"wanted_bytes", absl::StrCat(bytes)}});
  }
  block->mapping = *std::move(mapping);
  return block;
}

void JobMemory::Return(const Block& block) { bytes_ -= block.taken_bytes; }

void JobMemory::Replace(Block& place, Block block) {
  Return(place);
  place = std::move(block);
}

absl::Status JobMemory::AllocateLane(LaneIndex lane, int64_t state_bytes, int64_t staging_bytes,
                                     int64_t table_bytes) {
  const std::string name = absl::StrCat("lane", lane.value());
  {
    // The new memory may need the room of the old.
    MutexLock lock(mutex_);
    for (Block* old : {&lanes_[lane].state, &lanes_[lane].staging, &lanes_[lane].table}) {
      Replace(*old, Block());
    }
  }
  kernels::MemoryHolder& device = device_.memory(lane);
  absl::StatusOr<Block> state = Make(device, state_bytes, name + ":state");
  if (!state.ok()) return state.status();
  absl::StatusOr<Block> staging = Make(device, staging_bytes, name + ":staging");
  absl::StatusOr<Block> table = staging.ok() ? MakeHost(table_bytes, name + ":table")
                                             : absl::StatusOr<Block>(staging.status());
  MutexLock lock(mutex_);
  if (!table.ok()) {
    Return(*state);
    if (staging.ok()) Return(*staging);
    return table.status();
  }
  Replace(lanes_[lane].state, *std::move(state));
  Replace(lanes_[lane].staging, *std::move(staging));
  Replace(lanes_[lane].table, *std::move(table));
  return absl::OkStatus();
}

absl::Status JobMemory::AllocateHostCopy(LaneIndex lane, int64_t bytes) {
  {
    MutexLock lock(mutex_);
    Replace(lanes_[lane].host_copy, Block());
  }
  if (bytes == 0) return absl::OkStatus();
  absl::StatusOr<Block> block = MakeHost(bytes, absl::StrCat("lane", lane.value(), ":copy"));
  if (!block.ok()) return block.status();
  MutexLock lock(mutex_);
  Replace(lanes_[lane].host_copy, *std::move(block));
  return absl::OkStatus();
}

absl::Status JobMemory::AllocateBoard(int64_t bytes) {
  absl::StatusOr<Block> block = MakeHost(bytes, "board");
  if (!block.ok()) return block.status();
  MutexLock lock(mutex_);
  Replace(board_, *std::move(block));
  return absl::OkStatus();
}

absl::StatusOr<int> JobMemory::Arena(TrainerRank rank, const std::string& device_uuid,
                                     uint32_t arena_id, int64_t bytes, bool& kept) {
  kept = false;
  absl::StatusOr<kernels::MemoryHolder*> device = device_.ArenaMemory(rank.value(), device_uuid);
  if (!device.ok()) return device.status();
  {
    MutexLock lock(mutex_);
    Trainer& trainer = trainers_[rank];
    if (trainer.device_uuid != device_uuid) ReturnArenas(trainer);
    trainer.device_uuid = device_uuid;
    const auto arena = trainer.arenas.find(arena_id);
    if (arena != trainer.arenas.end()) {
      if (arena->second.bytes == bytes) {
        kept = true;
        return arena->second.fd.get();
      }
      Return(arena->second);
      trainer.arenas.erase(arena);
    }
  }
  absl::StatusOr<Block> block =
      Make(**device, bytes, absl::StrCat("rank", rank.value(), ":arena", arena_id));
  if (!block.ok()) return block.status();
  MutexLock lock(mutex_);
  Block& place = trainers_[rank].arenas[arena_id];
  Replace(place, *std::move(block));
  return place.fd.get();
}

void JobMemory::ReturnArenas(Trainer& trainer) {
  for (const auto& [id, arena] : trainer.arenas) Return(arena);
  trainer.arenas.clear();
  trainer.mapped_by.clear();
}

void JobMemory::ReturnKept() {
  std::erase_if(kept_, [this](const Kept& kept) DMUOND_REQUIRES(mutex_) {
    const bool free = std::all_of(kept.mapped_by.begin(), kept.mapped_by.end(),
                                  [](const auto& process) { return process->HasLetGo(); });
    if (free) bytes_ -= kept.taken_bytes;
    return free;
  });
}

bool JobMemory::KeepFromOthers(TrainerRank rank, const TrainerProcess& process) {
  MutexLock lock(mutex_);
  Trainer& trainer = trainers_[rank];
  const auto may_write = [&process](const auto& other) { return other->MayWriteBeside(process); };
  if (std::none_of(trainer.mapped_by.begin(), trainer.mapped_by.end(), may_write)) return false;
  Kept& kept = kept_.emplace_back(Kept{.rank = rank, .mapped_by = std::move(trainer.mapped_by)});
  for (const auto& [id, arena] : trainer.arenas) kept.taken_bytes += arena.taken_bytes;
  trainer.arenas.clear();
  trainer.mapped_by.clear();
  return true;
}

void JobMemory::GiveTo(TrainerRank rank, TrainerProcessPtr process) {
  MutexLock lock(mutex_);
  std::vector<TrainerProcessPtr>& mapped_by = trainers_[rank].mapped_by;
  // One connection tells of a process's end as well as another.
  std::erase_if(mapped_by, [&process](const auto& other) {
    return other == process || other->peer.HasEnded() || process->IsSeenFor(*other);
  });
  mapped_by.push_back(std::move(process));
}

int64_t JobMemory::KeptBytes(TrainerRank rank) const {
  MutexLock lock(mutex_);
  int64_t bytes = 0;
  for (const Kept& kept : kept_) {
    if (kept.rank == rank) bytes += kept.taken_bytes;
  }
  return bytes;
}

void JobMemory::DropArenas(TrainerRank rank) {
  MutexLock lock(mutex_);
  const auto trainer = trainers_.find(rank);
  if (trainer != trainers_.end()) ReturnArenas(trainer->second);
}

absl::StatusOr<int> JobMemory::Timeline(TrainerRank rank, uint32_t buckets) {
  const std::string name = absl::StrCat("rank", rank.value(), ":timeline");
  if (buckets > wire::kBucketsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": ", buckets, " buckets, at most ", wire::kBucketsMax));
  }
  Poison(rank);
  absl::StatusOr<Block> block = MakeHost(static_cast<int64_t>(wire::TimelineBytes(buckets)), name);
  if (!block.ok()) return block.status();
  auto* header = new (block->mapping->data()) wire::PageHeader{};
  header->magic = wire::kTimelineMagic;
  header->version = wire::kTimelineVersion;
  header->buckets = buckets;
  MutexLock lock(mutex_);
  Trainer& trainer = trainers_[rank];
  Replace(trainer.timeline, *std::move(block));
  trainer.buckets = buckets;
  return trainer.timeline.fd.get();
}

void JobMemory::EndWaits(const Trainer& trainer, uint64_t awaited, uint64_t value) {
  if (trainer.timeline.mapping == nullptr) return;
  const wire::TimelinePage page(trainer.timeline.mapping->data());
  for (uint32_t bucket = 0; bucket < trainer.buckets; ++bucket) {
    wire::TimelineWord& word = page.published(bucket, trainer.buckets);
    if (wire::Read(word) < awaited) wire::AdvanceTo(word, value);
  }
}

void JobMemory::Poison(TrainerRank rank) {
  MutexLock lock(mutex_);
  const auto trainer = trainers_.find(rank);
  if (trainer != trainers_.end()) EndWaits(trainer->second, wire::kPoison, wire::kPoison);
}

void JobMemory::PoisonAll() {
  MutexLock lock(mutex_);
  for (const auto& [rank, trainer] : trainers_) EndWaits(trainer, wire::kPoison, wire::kPoison);
}

void JobMemory::MarkRollback(uint32_t epoch, uint64_t awaited) {
  MutexLock lock(mutex_);
  for (const auto& [rank, trainer] : trainers_) {
    EndWaits(trainer, awaited, wire::RollbackMark(epoch));
  }
}

int JobMemory::LaneFd(LaneIndex lane, Block Lane::*block) const {
  MutexLock lock(mutex_);
  const auto found = lanes_.find(lane);
  return found == lanes_.end() ? -1 : (found->second.*block).fd.get();
}

int JobMemory::state_fd(LaneIndex lane) const { return LaneFd(lane, &Lane::state); }
int JobMemory::staging_fd(LaneIndex lane) const { return LaneFd(lane, &Lane::staging); }
int JobMemory::table_fd(LaneIndex lane) const { return LaneFd(lane, &Lane::table); }

int JobMemory::host_copy_fd(LaneIndex lane) const { return LaneFd(lane, &Lane::host_copy); }

int JobMemory::board_fd() const {
  MutexLock lock(mutex_);
  return board_.fd.get();
}

int JobMemory::arena_fd(TrainerRank rank, uint32_t arena_id) const {
  MutexLock lock(mutex_);
  const auto trainer = trainers_.find(rank);
  if (trainer == trainers_.end()) return -1;
  const auto arena = trainer->second.arenas.find(arena_id);
  return arena == trainer->second.arenas.end() ? -1 : arena->second.fd.get();
}

int JobMemory::timeline_fd(TrainerRank rank) const {
  MutexLock lock(mutex_);
  const auto trainer = trainers_.find(rank);
  return trainer == trainers_.end() ? -1 : trainer->second.timeline.fd.get();
}

std::shared_ptr<kernels::Mapping> JobMemory::table(LaneIndex lane) const {
  MutexLock lock(mutex_);
  const auto found = lanes_.find(lane);
  return found == lanes_.end() ? nullptr : found->second.table.mapping;
}

std::shared_ptr<kernels::Mapping> JobMemory::host_copy(LaneIndex lane) const {
  MutexLock lock(mutex_);
  const auto found = lanes_.find(lane);
  return found == lanes_.end() ? nullptr : found->second.host_copy.mapping;
}

int64_t JobMemory::bytes() const {
  MutexLock lock(mutex_);
  return bytes_;
}

}  // namespace dmuond::server
