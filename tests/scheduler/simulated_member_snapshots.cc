// What a simulated daemon saves, and how it leaves.
#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "scheduler/convert/convert.h"
#include "tests/scheduler/simulated_coordinator.h"
#include "tests/scheduler/simulated_member.h"

namespace dmuond::scheduler::testing {
namespace {

constexpr int64_t kFileBytes = 4096;
constexpr std::chrono::milliseconds kLeavesWithin{3'000};
constexpr Microseconds kDiskTimeout = 50 * kMillisecond;
constexpr std::chrono::milliseconds kLeaversPatience{1'000};

}  // namespace

// ---- the disk ----

std::optional<SnapshotId> SimulatedMember::Newest() const {
  if (simulation_.disk.empty()) return std::nullopt;
  return simulation_.disk.rbegin()->first;
}

void SimulatedMember::FindNewest(uint32_t epoch) {
  OnDisk([this, epoch] {
    v1::MemberMessage message;
    message.set_job(simulation_.name());
    message.mutable_newest_snapshot()->set_epoch(epoch);
    if (const auto newest = Newest()) {
      *message.mutable_newest_snapshot()->mutable_newest() = ToProto(*newest);
    }
    TellHere(message);
  });
}

void SimulatedMember::DiscardSnapshots(const v1::DiscardSnapshots& discard) {
  OnDisk([this, discard] {
    simulation_.Trace("older snapshots are discarded");
    simulation_.disk.clear();
    simulation_.invariants.Discarded();
    v1::MemberMessage message;
    message.set_job(simulation_.name());
    message.mutable_discarded()->set_job(discard.job());
    message.mutable_discarded()->set_job_incarnation(discard.job_incarnation());
    TellHere(message);
  });
}

void SimulatedMember::AnotherGroupSaves() {
  const bool begun = std::any_of(
      simulation_.members.begin(), simulation_.members.end(),
      [](const SimulatedMember* member) { return member->job_ && member->job_->exists(); });
  const std::optional<SnapshotId> newest = Newest();
  if (!newest || begun || simulation_.group.coordinator->Knows(simulation_)) return;
  ++simulation_.counts.snapshots_of_others;
  const SnapshotId saved{
      MakeAttempt(GroupEpoch(std::max(EpochOf(newest->attempt).value(), job_->epoch()) +
                             static_cast<uint32_t>(simulation_.chance.Pick(0, 2))),
                  1'000'000),
      newest->step};
  simulation_.Trace("another group saves step ", saved.step.value(), ", epoch ",
                    EpochOf(saved.attempt).value());
  simulation_.disk[saved] = simulation_.disk.at(*newest);
  simulation_.invariants.SavedElsewhere(*newest, saved);
}

void SimulatedMember::GoBackToNewest() {
  if (!alive_ || !job_->settled()) return;
  OnDisk([this, epoch = job_->epoch()] {
    const std::optional<SnapshotId> newest = Newest();
    if (job_->epoch() != epoch || !job_->settled() || !newest) return;
    Perform(job_->AskToGoBack(*newest, "somebody asked for it"));
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
    GiveUpWriting();
    disk_hangs_ = "the disk hangs";
    job_->SetDiskHangs(disk_hangs_);
  });
  simulation_.time.At(disk_.last, [this, boot = boot_] {
    if (boot_ != boot) return;
    disk_hangs_.clear();
    job_->SetDiskHangs("");
  });
}

// It has failed here, whatever becomes of it.
void SimulatedMember::GiveUpWriting() {
  if (committing_) {
    ++simulation_.counts.hung_snapshots;
    TellManifestWritten(std::exchange(committing_, std::nullopt)->attempt, false);
  }
  if (job_->exists() && job_->snapshot().state() == SnapshotPart::State::kWriting) {
    ++simulation_.counts.hung_snapshots;
  }
  Perform(job_->OnDiskHangs("the disk hangs"));
}

// ---- snapshots ----

void SimulatedMember::Do(const node::WriteSnapshot& order) {
  EndCopy(false);
  copies_.emplace(Copies{});
  copies_->attempt = Attempt(order.save.attempt());
  copies_->number = ++writes_;
  copies_->states.resize(lanes_.size());
  if (!order.abandoned.empty()) EndCopy(false);
}

void SimulatedMember::Do(const node::Copied& order) {
  if (!copies_ || copies_->ended) return;
  copies_->states[order.lane.value()] = order.report.updates(0);
  for (const auto& state : copies_->states) {
    if (!state) return;
  }
  EndCopy(!simulation_.chance.Of(5));
}

void SimulatedMember::EndCopy(bool written) {
  if (!copies_ || std::exchange(copies_->ended, true)) return;
  std::vector<v1::SnapshotFile> files;
  for (size_t rail = 0; written && rail < copies_->states.size(); ++rail) {
    v1::SnapshotFile& file = files.emplace_back();
    // Manifests have them in the order of their names.
    file.set_name(absl::StrCat("lane-", absl::Dec(node_.value(), absl::kZeroPad4), "-",
                               absl::Dec(rail, absl::kZeroPad4)));
    file.set_bytes(kFileBytes);
    // 16 hexadecimal digits as in a real one, and here the state itself.
    file.set_header_checksum(absl::StrCat(absl::Hex(*copies_->states[rail], absl::kZeroPad16)));
  }
  OnDisk([this, written, number = copies_->number, attempt = copies_->attempt,
          files = std::move(files)] {
    if (writes_ != number) return;
    absl::StatusOr<std::vector<v1::SnapshotFile>> result = absl::UnavailableError("it has failed");
    if (written) result = files;
    Perform(job_->OnWritten(attempt.value(), result));
  });
}

void SimulatedMember::Do(const node::Restore& order) {
  OnDisk([this, number = ++restores_, from = order.from] {
    if (restores_ != number) return;
    const auto snapshot = simulation_.disk.find(from);
    if (snapshot == simulation_.disk.end()) {
      return simulation_.Fail("the snapshot that the job goes back to is not there");
    }
    // Whether an older snapshot can be read is for the directory to know; here none can.
    if (simulation_.chance.Of(3)) {
      return Perform(job_->OnRestored(simulation_.Now(), absl::DataLossError("a file is broken")));
    }
    const std::vector<uint64_t>& states = snapshot->second;
    NodeJob::Restored restored;
    restored.from.manifest.set_step(from.step.value());
    restored.from.manifest.set_attempt(from.attempt.value());
    for (size_t i = 0; i < lanes_.size(); ++i) {
      restored.updates.push_back({states[node_.value() * lanes_.size() + i]});
    }
    history_ = simulation_.invariants.StateOf(from);
    Perform(job_->OnRestored(simulation_.Now(), std::move(restored)));
  });
}

void SimulatedMember::Do(const node::SetSnapshotsAside& order) {
  committing_.reset();
  OnDisk([this, to = order.after, kept = kept_] {
    if (kept_ != kept) return;
    simulation_.disk.erase(simulation_.disk.upper_bound(to), simulation_.disk.end());
  });
}

void SimulatedMember::TellManifestWritten(Attempt attempt, bool written) {
  v1::MemberMessage message;
  message.set_job(simulation_.name());
  message.mutable_manifest_written()->set_attempt(attempt.value());
  if (!written) message.mutable_manifest_written()->set_error("it has failed");
  TellHere(message);
}

void SimulatedMember::WriteManifest(const v1::SnapshotManifest& manifest) {
  const SnapshotId id{Attempt(manifest.attempt()), StepId(manifest.step())};
  std::vector<uint64_t> states;
  for (const v1::SnapshotFile& file : manifest.files()) {
    states.push_back(std::stoull(file.header_checksum(), nullptr, 16));
  }
  committing_ = id;
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
  simulation_.Trace("node ", node_.value(), " is told to leave");
  leaves_ = std::move(leaves);
  leaves_by_ = simulation_.Now() + kLeavesWithin;
  BeginDeparture();
  AdvanceDeparture();
}

void SimulatedMember::BeginDeparture() {
  departure_ = {};
  Perform(departure_.Begin(*job_, leaves_by_, kLeaversPatience,
                           simulation_.options.snapshot_every > 0));
}

void SimulatedMember::AdvanceDeparture() {
  if (!departure_.begun() || prepared()) return;
  Perform(departure_.Advance(simulation_.Now(), *job_));
  if (departure_.LooksForSnapshot(*job_)) LookForSnapshot();
  if (!prepared()) return;
  if (departure_.saved().ok() && job_->exists() && job_->Saved()) {
    // The state may have another attempt since, in a new epoch.
    const v1::SnapshotDone& done = job_->snapshot().done();
    if (seen_ && seen_->attempt.value() == job_->applied_attempt()) {
      simulation_.invariants.LeavesWith(*seen_);
    } else if (done.error().empty() && done.attempt() != 0) {
      simulation_.invariants.LeavesWith({Attempt(done.attempt()), StepId(done.step())});
    }
  }
  simulation_.time.After(simulation_.chance.Pick(0, 5 * kMillisecond), [this, boot = boot_] {
    if (boot_ == boot && leaves_) leaves_();
  });
}

void SimulatedMember::LookForSnapshot() {
  if (std::exchange(looks_, true)) return;
  OnDisk([this] {
    looks_ = false;
    const std::optional<SnapshotId> newest = Newest();
    if (!newest || !job_->exists() || newest->attempt.value() != job_->applied_attempt()) return;
    seen_ = newest;
    ++simulation_.counts.snapshots_seen;
    job_->OnSnapshotSeen(*newest);
    AdvanceDeparture();
  });
}

}  // namespace dmuond::scheduler::testing
