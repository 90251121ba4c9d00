// The engine's part in snapshots: copying the state to host memory, and taking it from there.
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/status_macros.h"
#include "server/common/log.h"
#include "server/lane/engine.h"

namespace dmuond::server::lane {

absl::Status Engine::OnSnapshot(const v1::LaneCommand::TakeSnapshot& snapshot) {
  tasks_.push_back({.snapshot = scheduler::Attempt(snapshot.attempt())});
  return absl::OkStatus();
}

absl::Status Engine::StartSnapshot(scheduler::Attempt attempt) {
  std::vector<uint64_t> updates;
  RETURN_IF_ERROR(snapshot_->Start(updates));
  snapshot_attempt_ = attempt;
  snapshot_batches_ = snapshot_->batches();
  held_us_ = 0;
  v1::LaneReport report;
  v1::LaneReport::Copied& copied = *report.mutable_copied();
  copied.set_attempt(attempt.value());
  copied.set_batches(snapshot_batches_);
  copied.set_complete(!snapshot_->active());
  copied.mutable_updates()->Add(updates.begin(), updates.end());
  slots_->AddNonFinite(*copied.mutable_non_finite());
  return channel_.Send(report);
}

absl::StatusOr<bool> Engine::ProgressSnapshot() {
  absl::StatusOr<bool> progress = snapshot_->Progress();
  if (!progress.ok() || snapshot_->batches() == snapshot_batches_) return progress;
  snapshot_batches_ = snapshot_->batches();
  v1::LaneReport report;
  v1::LaneReport::Copied& copied = *report.mutable_copied();
  copied.set_attempt(snapshot_attempt_.value());
  copied.set_batches(snapshot_batches_);
  copied.set_complete(!snapshot_->active());
  copied.set_held_us(held_us_);
  RETURN_IF_ERROR(channel_.Send(report));
  return true;
}

absl::Status Engine::OnLoadState(const v1::LaneCommand::LoadState& load) {
  fault::FaultPoint("lane.load_state");
  absl::Status status = SpoilChecks();
  if (status.ok()) status = snapshot_->Leave();
  if (status.ok()) {
    status = LoadHostCopy(job_, *slots_, device_, *update_stream_, scheduler::StepId(load.step()),
                          {load.updates().begin(), load.updates().end()});
  }
  log::Info("state loaded",
            {{"job", job_.name}, {"epoch", job_.epoch}, {"step", load.step()}, {"what", status}});
  v1::LaneReport report;
  report.mutable_state_loaded();
  if (!status.ok()) report.mutable_state_loaded()->set_error(std::string(status.message()));
  return channel_.Send(report);
}

}  // namespace dmuond::server::lane
