// What a simulated daemon saves, and how it leaves.
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/scheduler/simulated_coordinator.h"
#include "tests/scheduler/simulated_member.h"

namespace dmuond::scheduler::testing {
namespace {

constexpr Microseconds kLeavesAfter = 3'000 * kMillisecond;  // if it cannot save
constexpr Microseconds kDiskTimeout = 50 * kMillisecond;
constexpr std::chrono::milliseconds kLeaversPatience{1'000};

}  // namespace

// ---- snapshots ----

std::optional<SnapshotId> SimulatedMember::Newest() const {
  if (simulation_.disk.empty()) return std::nullopt;
  return simulation_.disk.rbegin()->first;
}

void SimulatedMember::FindNewest(uint32_t epoch) {
  OnDisk([this, epoch] {
    v1::MemberMessage message;
    message.mutable_newest_snapshot()->set_epoch(epoch);
    if (const auto newest = Newest()) {
      message.mutable_newest_snapshot()->set_step(newest->step.value());
    }
    TellHere(message);
  });
}

void SimulatedMember::GoBackToNewest() {
  const auto settled = [this] {
    return alive_ && job_ && job_->has_state && steps_ && !job_->reforming && epoch_ != 0 &&
           EpochOf(steps_->open().attempt).value() == epoch_;
  };
  if (!settled()) return;
  OnDisk([this, settled, epoch = epoch_] {
    const std::optional<SnapshotId> newest = Newest();
    if (epoch_ != epoch || !settled() || !newest) return;
    v1::MemberMessage message;
    message.mutable_load_snapshot()->set_step(newest->step.value());
    message.mutable_load_snapshot()->set_epoch(epoch);
    Tell(std::move(message));
  });
}

// One after the other, as the daemon's thread for disks does it; without the daemon, not at all.
void SimulatedMember::OnDisk(Event event) {
  simulation_.network.Send(disk_, simulation_.chance.Pick(0, 30 * kMillisecond), 0,
                           [this, boot = boot_, event = std::move(event)] {
                             if (boot_ == boot) event();
                           });
}

void SimulatedMember::DiskHangs(Microseconds for_so_long) {
  if (!alive_) return;
  simulation_.Trace("the disk of node ", node_.value(), " hangs");
  OnDisk([] {});
  disk_.last += for_so_long;
  if (for_so_long <= kDiskTimeout) return;
  simulation_.time.After(kDiskTimeout, [this, boot = boot_] {
    if (boot_ != boot) return;
    disk_hangs_ = true;
    GiveUpSnapshot();
  });
  simulation_.time.At(disk_.last, [this, boot = boot_] {
    if (boot_ == boot) disk_hangs_ = false;
  });
}

// It has failed here, whatever becomes of it.
void SimulatedMember::GiveUpSnapshot() {
  if (committing_) {
    ++simulation_.counts.hung_snapshots;
    TellManifestWritten(std::exchange(committing_, std::nullopt)->attempt, false);
  }
  if (!copying_ || copying_->answered) return;
  ++simulation_.counts.hung_snapshots;
  copying_->ended = copying_->answered = true;
  copying_->states.clear();
  TellWritten();
}

void SimulatedMember::HandleSave(const SnapshotId& id) {
  if (!job_ || !job_->has_plan()) return;
  if (copying_ && copying_->id == id) {
    // Said again after a new epoch. While it is being written the answer comes by itself.
    if (copying_->answered) TellWritten();
    return;
  }
  EndCopy(false);
  copying_.emplace();
  copying_->id = id;
  copying_->number = ++copies_;
  if (disk_hangs_) return GiveUpSnapshot();
  copying_->states.resize(lanes_.size());
  // What was said when the link was down, and the state has gone on, comes too late.
  bool able = !job_->reforming && id.attempt == job_->applied_attempt;
  for (const SimulatedLane& lane : lanes_) able = able && !lane.dead();
  if (!able) return EndCopy(false);
  for (SimulatedLane& lane : lanes_) lane.Copy(id.attempt);
}

void SimulatedMember::Copied(LaneIndex rail, Attempt attempt, uint64_t state) {
  if (!copying_ || copying_->ended || copying_->id.attempt != attempt) return;
  copying_->states[rail.value()] = state;
  if (++copying_->copied == lanes_.size()) EndCopy(!simulation_.chance.Of(5));
}

void SimulatedMember::EndCopy(bool written) {
  if (!copying_ || std::exchange(copying_->ended, true)) return;
  OnDisk([this, written, number = copying_->number] {
    // Of a job that is no more; or it hung, and was answered for.
    if (!copying_ || copying_->number != number || copying_->answered) return;
    if (!written) copying_->states.clear();
    copying_->answered = true;
    TellWritten();
  });
}

void SimulatedMember::TellWritten() {
  v1::MemberMessage message;
  v1::SnapshotWritten& written = *message.mutable_snapshot_written();
  written.set_attempt(copying_->id.attempt.value());
  written.set_node(node_.value());
  if (copying_->states.empty()) written.set_error("it has failed");
  for (size_t rail = 0; rail < copying_->states.size(); ++rail) {
    v1::SnapshotFile& file = *written.add_files();
    // Manifests have them in the order of their names.
    file.set_name(absl::StrCat("lane-", absl::Dec(node_.value(), absl::kZeroPad4), "-",
                               absl::Dec(rail, absl::kZeroPad4)));
    file.set_bytes(static_cast<int64_t>(copying_->states[rail]));
  }
  Tell(std::move(message));
}

void SimulatedMember::TellManifestWritten(Attempt attempt, bool written) {
  v1::MemberMessage message;
  message.mutable_manifest_written()->set_attempt(attempt.value());
  if (!written) message.mutable_manifest_written()->set_error("it has failed");
  TellHere(message);
}

void SimulatedMember::HandleWriteManifest(const v1::SnapshotManifest& manifest) {
  const SnapshotId id{Attempt(manifest.attempt()), StepId(manifest.step())};
  std::vector<uint64_t> states;
  for (const v1::SnapshotFile& file : manifest.files()) {
    states.push_back(static_cast<uint64_t>(file.bytes()));
  }
  committing_ = id;
  if (disk_hangs_) {  // not within the coordinator's own call
    return simulation_.time.After(0, [this, boot = boot_] {
      if (boot_ == boot) GiveUpSnapshot();
    });
  }
  OnDisk([this, id, states = std::move(states)] {
    const bool written = !states.empty() && !simulation_.chance.Of(5);
    if (written) {
      simulation_.disk[id] = states;
      simulation_.invariants.ManifestExists(id, states);
    }
    if (committing_ != id) return;  // it hung, and was answered for
    committing_.reset();
    TellManifestWritten(id.attempt, written);
  });
}

// ---- planned departures ----

void SimulatedMember::PrepareToLeave(Event leaves) {
  if (!alive_ || leaves_) return leaves();
  simulation_.Trace("node ", node_.value(), " is told to leave");
  leaves_ = std::move(leaves);
  if (!job_ || !job_->has_state || !job_->failed.ok()) return Goes();
  TellLeaving();
  simulation_.time.After(kLeavesAfter, [this, boot = boot_] {
    if (boot_ == boot) Goes();
  });
}

void SimulatedMember::TellLeaving() {
  v1::MemberMessage message;
  message.mutable_leaving()->set_node(node_.value());
  message.mutable_leaving()->set_patience_ms(kLeaversPatience.count());
  Tell(std::move(message));
}

void SimulatedMember::HandleHalted(const v1::Halted& halted) {
  if (!leaves_ || halted.node() != node_.value()) return;
  halted_ = true;
  // Nothing is ever saved, and its state goes with it.
  if (simulation_.options.snapshot_every == 0) return Goes();
  AskForSnapshot();
}

void SimulatedMember::AskForSnapshot() {
  v1::MemberMessage message;
  message.mutable_snapshot_request()->set_node(node_.value());
  Tell(std::move(message));
}

void SimulatedMember::HandleSnapshotDone(const v1::SnapshotDone& done) {
  const SnapshotId id{Attempt(done.attempt()), StepId(done.step())};
  const bool written = done.error().empty();
  if (!written && copying_ && copying_->id == id) copying_.reset();
  if (!leaves_ || !halted_ || !job_ || !job_->has_state) return;
  // Of lanes that were replaced since, or of a past that is no more.
  if (!written || id.attempt != job_->applied_attempt) return AskForSnapshot();
  simulation_.invariants.LeavesWith(id);
  Goes();
}

void SimulatedMember::Goes() {
  simulation_.time.After(simulation_.chance.Pick(0, 5 * kMillisecond), [this, boot = boot_] {
    if (boot_ == boot && leaves_) std::exchange(leaves_, nullptr)();
  });
}

}  // namespace dmuond::scheduler::testing
