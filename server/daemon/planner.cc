#include "server/daemon/planner.h"

#include <chrono>
#include <utility>

namespace dmuond::server {

absl::StatusOr<scheduler::PlannedJob> Planner::Make(const v1::PlanInputs& wire) {
  v1::PlanInputs same = wire;
  same.clear_job();
  same.clear_job_incarnation();
  same.clear_launch();
  same.clear_restore();
  std::string key = same.SerializeAsString();
  MutexLock lock(mutex_);
  if (last_.plan != nullptr && key == key_) return last_;
  const auto began = std::chrono::steady_clock::now();
  absl::StatusOr<scheduler::PlannedJob> made = scheduler::MakePlannedJob(wire);
  if (!made.ok()) return made.status();
  seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  last_ = *std::move(made);
  key_ = std::move(key);
  return last_;
}

}  // namespace dmuond::server
