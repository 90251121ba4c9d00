// The snapshot directory: what is read there for somebody who waits, and a directory that does not
// answer. It is noticed, and nobody waits for it any longer. The thread that hangs in it can
// neither be woken nor ended: it goes on by itself when the directory answers again, or ends with
// the process.
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/daemon/daemon.h"

namespace dmuond::server {
namespace {

constexpr char kHangs[] = "SNAPSHOT_DIR_HANGS";

}  // namespace

DiskWatch::News Daemon::WatchDisk(Disk& disk, Deadline now) {
  const DiskWatch::News news = disk.OnTick(now);
  if (news == DiskWatch::News::kNone) return news;
  const bool hangs = news == DiskWatch::News::kHangs;
  log::Write(hangs ? log::Level::kWarn : log::Level::kInfo,
             hangs ? "the snapshot directory hangs" : "the snapshot directory answers again",
             {{"job", job_ == nullptr ? "none" : job_->name},
              {"epoch", epoch_},
              {"what", disk.hang().what},
              {"since", disk.hang().since}});
  return news;
}

void Daemon::WatchDisks(Deadline now) {
  if (writes_ != nullptr && WatchDisk(*writes_, now) == DiskWatch::News::kHangs) {
    GiveUpSnapshot();
    if (discarding_.has_value()) TellDiscarded(DirectoryHangs(*writes_));
  }
  if (reads_ == nullptr || WatchDisk(*reads_, now) != DiskWatch::News::kHangs) return;
  mutex_.Changed();
  if (newest_owed_.has_value()) TellNewestSnapshot(DirectoryHangs(*reads_));
}

void Daemon::GiveUpSnapshot() {
  const std::string why = writes_->hang().Words();
  if (const uint64_t attempt = std::exchange(committing_, 0); attempt != 0) {
    TellManifestWritten(attempt, why, kHangs);
  }
  if (job_ == nullptr) return;
  const std::optional<v1::SnapshotWritten> answer = job_->snapshots.part.OnDiskHangs(why);
  if (!answer.has_value()) return;
  job_->snapshots.GiveUp(why);
  TellWritten(*answer);
}

absl::Status Daemon::Read(
    const std::function<void(storage::Storage&, const Cancelled& unwanted)>& work,
    const Cancelled& cancelled) {
  auto done = std::make_shared<bool>(false);
  auto unwanted = std::make_shared<std::atomic<bool>>(false);
  if (reads_ != nullptr && !reads_->hangs()) {
    reads_->Post([this, work, done, unwanted, disk = reads_.get()] {
      // Others wait for the thread.
      if (unwanted->load()) return;
      work(disk->storage(), [unwanted] { return unwanted->load(); });
      StateLock lock(mutex_);
      *done = true;
      mutex_.Changed();
    });
  }
  absl::StatusOr<bool> ended =
      Wait([&]() DMUOND_REQUIRES(mutex_) { return *done || reads_ == nullptr || reads_->hangs(); },
           Deadline::max(), cancelled);
  unwanted->store(true);
  if (!ended.ok()) return ended.status();
  if (*done) return absl::OkStatus();
  if (reads_ == nullptr) {
    return Error(absl::StatusCode::kUnavailable, "DRAINING", "this daemon is leaving");
  }
  return DirectoryHangs(*reads_);
}

absl::Status Daemon::DirectoryHangs(const Disk& disk) const {
  return Error(absl::StatusCode::kUnavailable, kHangs,
               Say("the snapshot directory of node ", Named("node", options_.node),
                   " hangs: ", Named("operation", disk.hang().Words())));
}

}  // namespace dmuond::server
