// The engine's part in checks of all copies.
#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "server/lane/engine.h"

namespace dmuond::server::lane {

absl::Status Engine::OnCheck(const v1::CheckExtracts& check) {
  tasks_.push_back({.check = check});
  return absl::OkStatus();
}

void Engine::NoteWriting(const std::vector<int32_t>& ranks) {
  for (const int32_t rank : trainers_.attached()) {
    const bool wanted = ranks.empty() || std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
    if (wanted) writing_to_[rank] = trainers_.Find(rank)->incarnation;
  }
}

absl::StatusOr<bool> Engine::ProgressCheck() {
  const Clock::time_point began = Clock::now();
  std::optional<v1::ExtractsChecked> checked = check_->Progress([this](int32_t rank) {
    const TrainerMemory::Trainer* trainer = trainers_.Find(rank);
    return trainer != nullptr && !trainer->gone && trainer->incarnation == written_to_[rank];
  });
  const Clock::time_point now = Clock::now();
  check_part_us_ = std::max<double>(check_part_us_, Microseconds(began, now));
  if (!checked.has_value()) return true;
  // What comes while a part is digested is read after it.
  checked->set_held_us(check_part_us_ + (checked_since_ ? Microseconds(*checked_since_, now) : 0));
  if (absl::Status sent = Send(*std::move(checked)); !sent.ok()) return sent;
  return true;
}

absl::Status Engine::SpoilChecks() {
  absl::Status sent;
  if (check_->active()) sent = Send(check_->Spoil());
  while (sent.ok()) {
    const auto next = std::find_if(tasks_.begin(), tasks_.end(),
                                   [](const Task& task) { return task.check.has_value(); });
    if (next == tasks_.end()) break;
    check_->Start(*std::move(next->check));
    tasks_.erase(next);
    sent = Send(check_->Spoil());
  }
  return sent;
}

absl::Status Engine::Send(v1::ExtractsChecked&& checked) {
  v1::LaneReport report;
  *report.mutable_checked() = std::move(checked);
  return channel_.Send(report);
}

}  // namespace dmuond::server::lane
