#include "server/daemon/ended_jobs.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/common/log.h"
#include "server/storage/snapshot_store.h"

namespace dmuond::server {
namespace {

using std::chrono::milliseconds;

// The directory is looked at so often at least, and so often at most.
constexpr milliseconds kLooksEveryMax = std::chrono::hours(1);
constexpr milliseconds kLooksEveryMin{100};

absl::Time WrittenAt(const storage::SnapshotEntry& entry) {
  return absl::FromUnixSeconds(entry.manifest.time().seconds());
}

}  // namespace

EndedJobs::EndedJobs(std::deque<Place>& places, PlaceFinder& finder)
    : places_(places),
      finder_(finder),
      kept_(places.front().core.options.node == 0
                ? places.front().core.options.snapshots_of_ended_jobs
                : milliseconds(0)) {}

void EndedJobs::Tick() {
  const auto now = std::chrono::steady_clock::now();
  if (kept_.count() == 0 || now < next_look_ || looks_.load()) return;
  next_look_ = now + std::clamp(kept_ / 10, kLooksEveryMin, kLooksEveryMax);
  Core& core = places_.front().core;
  StateLock lock(core.mutex);
  Disk* const disk = core.disks.sweeps();
  if (disk == nullptr || disk->hangs()) return;
  looks_.store(true);
  disk->Post([this, disk] {
    Sweep(disk->storage());
    looks_.store(false);
  });
}

bool EndedJobs::HasEnded(const std::string& job) {
  for (Place& place : places_) {
    StateLock lock(place.core.mutex);
    const scheduler::GroupJob& group = *place.core.coordinator;
    if (!group.Formed() || place.core.job.leaves() || !place.core.clients.opening().empty()) {
      return false;
    }
    if (group.name() == job) return false;
    if (place.core.job.exists() && place.core.job.name() == job) return false;
  }
  return !finder_.Awaits(job);
}

void EndedJobs::Sweep(storage::Storage& storage) {
  const absl::StatusOr<std::vector<std::string>> jobs = storage::JobsIn(storage);
  if (!jobs.ok()) {
    return log::Warn("snapshots of ended jobs were not removed", {{"what", jobs.status()}});
  }
  for (const std::string& job : *jobs) {
    auto store = storage::SnapshotStore::Create(storage, job);
    if (!store.ok() || !HasEnded(job)) continue;
    const auto snapshots = store->List();
    if (!snapshots.ok()) continue;
    // Without a whole one there is none whose age is known, and one whose manifest cannot be read
    // may be anybody's: they stay for a person to look at.
    const auto newest =
        std::find_if(snapshots->begin(), snapshots->end(), [](const storage::SnapshotEntry& one) {
          return one.state == storage::SnapshotState::kDurable;
        });
    if (newest == snapshots->end() ||
        std::any_of(snapshots->begin(), snapshots->end(),
                    [](const storage::SnapshotEntry& one) { return one.unread(); })) {
      continue;
    }
    // One that names no group is nobody's to remove. What is newer than the newest whole one may be
    // what another group has written, whose job goes on from that one.
    const bool ours =
        std::all_of(snapshots->begin(), std::next(newest), [&](const storage::SnapshotEntry& one) {
          return store->GroupOf(one) == places_.front().core.options.group_name;
        });
    if (!ours) continue;
    const absl::Time written = WrittenAt(*newest);
    if (absl::Now() - written < absl::FromChrono(kept_)) continue;
    // The disk is slow, perhaps: a trainer may have come meanwhile.
    bool ended = true;
    const absl::Status removed =
        store->RemoveUpTo(newest->id, [&] { return ended = HasEnded(job); });
    if (!ended) continue;
    if (!removed.ok()) {
      log::Warn("snapshots of an ended job were not removed", {{"job", job}, {"what", removed}});
      continue;
    }
    log::Info("the snapshots of an ended job are removed (--snapshots_of_ended_jobs)",
              {{"job", job},
               {"step", newest->id.step.value()},
               {"written", absl::FormatTime(written, absl::UTCTimeZone())},
               {"path", storage.Describe(job)}});
  }
}

}  // namespace dmuond::server
