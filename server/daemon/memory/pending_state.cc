#include "server/daemon/memory/pending_state.h"

#include <algorithm>
#include <cstring>

#include "server/daemon/memory/state_transfer.h"

namespace dmuond::server {

absl::StatusOr<PendingState::Entry> PendingState::Make(size_t bytes) {
  absl::StatusOr<wire::UniqueFd> fd = holder_.Allocate(bytes, "state transfer");
  if (!fd.ok()) return fd.status();
  auto memory = kernels::cpu::MapShared(fd->get(), bytes);
  if (!memory.ok()) return memory.status();
  Entry entry;
  entry.fd = *std::move(fd);
  entry.memory = *std::move(memory);
  return entry;
}

absl::Status PendingState::Add(uint64_t attempt, const scheduler::Unit& unit, v1::StateKind kind,
                               const scheduler::Box& box, std::span<const float> values) {
  MutexLock lock(mutex_);
  if (attempt <= dropped_through_) return absl::OkStatus();
  Entries& entries = attempts_[attempt];
  auto place = entries.find({unit.id, kind});
  if (place == entries.end()) {
    const auto elements = static_cast<size_t>(scheduler::Elements(unit.box));
    absl::StatusOr<Entry> made = Make(elements * sizeof(float));
    if (!made.ok()) return made.status();
    made->given.resize(elements);
    place = entries.emplace(std::pair(unit.id, kind), *std::move(made)).first;
  }
  Entry& entry = place->second;
  auto* target_values = reinterpret_cast<float*>(entry.memory->data());
  ForRuns(box, unit.box, [&](int64_t source, int64_t target, int64_t run) {
    std::copy_n(values.begin() + source, run, target_values + target);
    const auto first = entry.given.begin() + target;
    entry.elements_given += run - std::count(first, first + run, true);
    std::fill(first, first + run, true);
  });
  return absl::OkStatus();
}

absl::Status PendingState::SetUpdates(uint64_t attempt, scheduler::UnitId unit, double updates) {
  MutexLock lock(mutex_);
  if (attempt <= dropped_through_) return absl::OkStatus();
  absl::StatusOr<Entry> made = Make(sizeof(updates));
  if (!made.ok()) return made.status();
  std::memcpy(made->memory->data(), &updates, sizeof(updates));
  made->given = {true};
  made->elements_given = 1;
  attempts_[attempt].insert_or_assign({unit, v1::STATE_KIND_STEP}, *std::move(made));
  return absl::OkStatus();
}

std::vector<PendingState::Tensor> PendingState::Tensors(uint64_t attempt) {
  MutexLock lock(mutex_);
  std::vector<Tensor> tensors;
  for (const auto& [key, entry] : attempts_[attempt]) {
    tensors.push_back({key.first, key.second, entry.fd.get(),
                       entry.elements_given == static_cast<int64_t>(entry.given.size())});
  }
  return tensors;
}

std::shared_ptr<void> PendingState::DropThrough(uint64_t attempt) {
  MutexLock lock(mutex_);
  dropped_through_ = std::max(dropped_through_, attempt);
  if (attempts_.empty() || attempts_.begin()->first > attempt) return nullptr;
  auto dropped = std::make_shared<std::vector<Entries>>();
  while (!attempts_.empty() && attempts_.begin()->first <= attempt) {
    dropped->push_back(std::move(attempts_.begin()->second));
    attempts_.erase(attempts_.begin());
  }
  return dropped;
}

}  // namespace dmuond::server
