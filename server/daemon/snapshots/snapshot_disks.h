// Performs in the snapshot directory what NodeJob and the coordinator order. It has two threads, so
// that reads need not wait for writes, and a third one where it sweeps, for which neither waits.
// When the directory does not answer, this is noticed, and nobody waits for it any longer. The
// thread that hangs in it can neither be woken nor ended: it goes on by itself when the directory
// answers again, or ends with the process.
//
// Threads: the daemon's lock.
#ifndef DMUOND_SERVER_DAEMON_SNAPSHOTS_SNAPSHOT_DISKS_H_
#define DMUOND_SERVER_DAEMON_SNAPSHOTS_SNAPSHOT_DISKS_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/v1/peer.pb.h"
#include "scheduler/job/node_actions.h"
#include "scheduler/job/node_job.h"
#include "scheduler/step.h"
#include "server/daemon/snapshots/disk.h"
#include "server/daemon/snapshots/node_snapshot.h"
#include "server/storage/storage.h"

namespace dmuond::server {

class SnapshotDisks {
 public:
  struct Options {
    int32_t node = 0;
    int32_t keep = 2;                     // so many snapshots of a job
    std::chrono::milliseconds timeout{};  // an operation that takes longer hangs
    std::string group;                    // of daemons, whose snapshots they are
    bool sweeps = false;                  // snapshots of ended jobs are removed by this process
  };
  struct Events {
    // Takes the daemon's lock and runs what it is given.
    std::function<void(const std::function<void()>&)> enter;
    // The following are called under the lock.
    std::function<void(v1::MemberMessage)> tell;  // the coordinator
    std::function<void(uint64_t attempt, const absl::StatusOr<std::vector<v1::SnapshotFile>>&)>
        on_written;
    std::function<void(absl::StatusOr<scheduler::NodeJob::Restored>,
                       std::optional<storage::SnapshotId> older)>
        on_restored;
    std::function<void(const std::string& how)> on_hangs;  // the write under way has failed
    std::function<void()> changed;                         // whoever waits looks again
  };
  // `storage` must outlive this object; null: no snapshots are made.
  SnapshotDisks(Options options, storage::Storage* storage, Events events);

  // ---- orders of NodeJob ----
  // `lanes` have the memory that the job's lanes copy into.
  void Write(const scheduler::node::WriteSnapshot& order, const std::string& job,
             std::shared_ptr<const std::vector<HostState>> lanes);
  void OnCopied(const scheduler::node::Copied& order);
  void AbandonCopies(const std::string& why);
  void GiveUpCopies(const std::string& why);
  void ForgetCopies() { copying_.reset(); }
  // The job that a thread reads or writes for.
  struct Job {
    std::string name;
    uint64_t incarnation = 0;
    scheduler::PlannedJob planned;  // null: it has no plan here
    GroupConfigs groups;
    std::shared_ptr<const std::vector<HostState>> host;
  };
  void Restore(const scheduler::node::Restore& order, Job job);
  void StopRestoring();
  void SetAside(const scheduler::node::SetSnapshotsAside& order, const std::string& job);
  // Drops the orders of SetAside() that a thread has not reached yet: those snapshots still count.
  void Keep() { ++kept_; }

  // ---- orders of the coordinator, to its own node ----
  void WriteManifest(const v1::WriteManifest& order, const Job& job);
  void Find(const v1::FindSnapshot& order);
  void Discard(const v1::DiscardSnapshots& order);

  // ---- for calls ----
  // The thread for reads does `work` without the lock, and then calls `done` with it. `unwanted`
  // tells the work that it is not wanted any more. False: there is no such thread, or it hangs.
  using Work = std::function<void(storage::Storage&, const std::function<bool()>& unwanted)>;
  bool Read(Work work, std::shared_ptr<std::atomic<bool>> unwanted, std::function<void()> done);

  // ---- time ----
  // `job` and `epoch` are for the log.
  void OnTick(scheduler::TimePoint now, const std::string& job, uint32_t epoch);
  [[nodiscard]] uint64_t read_bytes() const;  // of the snapshot that is being restored
  // Null: no snapshots, or the daemon has left.
  [[nodiscard]] Disk* writes() { return writes_.get(); }
  [[nodiscard]] Disk* reads() { return reads_.get(); }
  [[nodiscard]] Disk* sweeps() { return sweeps_.get(); }
  // How it hangs; empty: it does not.
  [[nodiscard]] std::string HangOfWrites() const;
  // REQUIRES: it hangs.
  [[nodiscard]] absl::Status Hangs(const Disk& disk) const;
  [[nodiscard]] std::array<std::unique_ptr<Disk>, 3> TakeDisks();

 private:
  // A snapshot that the thread for reads restores.
  struct Restoring {
    std::atomic<uint64_t> read_bytes = 0;
    std::atomic<bool> unwanted = false;
  };
  DiskWatch::News Watch(Disk& disk, scheduler::TimePoint now, const std::string& job,
                        uint32_t epoch);
  // The snapshot that is being written counts as failed from now on. REQUIRES: the directory hangs.
  void GiveUpWriting();
  void TellManifestWritten(uint64_t attempt, const std::string& error,
                           const std::string& reason = "");
  void TellNewest(const absl::StatusOr<std::optional<storage::SnapshotId>>& found);
  void TellDiscarded(const absl::Status& done);

  const Options options_;
  const Events events_;
  std::unique_ptr<Disk> writes_;
  std::unique_ptr<Disk> reads_;
  std::unique_ptr<Disk> sweeps_;             // null: it does not sweep
  std::shared_ptr<CopyProgress> copying_;    // of the snapshot that is being written
  uint64_t writing_ = 0;                     // counts what was ordered to be written
  std::shared_ptr<Restoring> restoring_;     // null: nothing has been restored
  uint64_t kept_ = 0;                        // counts calls of Keep()
  uint64_t committing_ = 0;                  // manifest that is being written; 0: none
  std::string committing_of_;                // its job
  std::optional<v1::FindSnapshot> finding_;  // an order of the coordinator that is not answered yet
  std::optional<v1::DiscardSnapshots> discarding_;  // the same
};

// A snapshot that a job can go back to: the newest of `step`, or for 0 of all. Reads the whole
// snapshot, so that no job goes back to one that cannot be read.
[[nodiscard]] absl::StatusOr<storage::SnapshotId> FindWayBack(
    storage::Storage& storage, const std::string& job, int64_t step,
    const scheduler::PlanInputs& inputs, const GroupConfigs& groups,
    const std::function<bool()>& unwanted);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_SNAPSHOTS_SNAPSHOT_DISKS_H_
