// All memory of one job on this node, held by descriptor: it outlives lanes and trainers, and goes
// with this object.
//
//   lane        state and staging (device memory), state table and copy of the state (host memory)
//   node        publish board (host memory)
//   trainer     arenas (device memory), timeline page (host memory)
//
// This object owns the descriptors that its getters return. Those of a trainer are valid until its
// rank asks again or is dropped: the caller makes one call for a rank at a time.
//
// Threads: any; allocations of different lanes and ranks run beside each other.
#ifndef DMUOND_SERVER_DAEMON_MEMORY_JOB_MEMORY_H_
#define DMUOND_SERVER_DAEMON_MEMORY_JOB_MEMORY_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "base/unique_fd.h"
#include "dmuond/wire/timeline.h"
#include "kernels/cpu/cpu_memory.h"
#include "kernels/device.h"
#include "scheduler/types.h"
#include "server/daemon/memory/node_device.h"
#include "server/daemon/trainer_process.h"

namespace dmuond::server {

class JobMemory {
 public:
  struct Options {
    std::string job;        // in the memory's names, for /proc and messages
    int64_t bytes_max = 0;  // all of the job's memory on this node; 0: no limit
  };

  // `device` makes device memory and must outlive this object. Host memory is made here.
  JobMemory(NodeDevice& device, Options options);
  ~JobMemory();  // PoisonAll(), then everything is closed
  JobMemory(const JobMemory&) = delete;
  JobMemory& operator=(const JobMemory&) = delete;

  // RESOURCE_EXHAUSTED, reason MEMORY_EXHAUSTED, with the bytes wanted and the limit. A second call
  // for the same lane, or for the board, replaces what was there: its old memory lives on only
  // where a process maps it. Sizes must be > 0.
  absl::Status AllocateLane(scheduler::LaneIndex lane, int64_t state_bytes, int64_t staging_bytes,
                            int64_t table_bytes);
  absl::Status AllocateBoard(int64_t bytes);
  // For the copy of a lane's state that a snapshot is written from; 0 bytes: none.
  absl::Status AllocateHostCopy(scheduler::LaneIndex lane, int64_t bytes);

  // The descriptor of an arena on the trainer's device (`device_uuid`, as NodeDevice::ArenaMemory
  // has it). `kept`: the arena has this device, this size and its contents from an earlier session
  // of the rank; else it is new and zero.
  absl::StatusOr<int> Arena(scheduler::TrainerRank rank, const std::string& device_uuid,
                            uint32_t arena_id, int64_t bytes, bool& kept);
  // The rank's next arenas are new ones. What its own process has mapped goes with the last who
  // does.
  void DropArenas(scheduler::TrainerRank rank);
  // To be called before `process`, now the rank's, is given arenas. Where another process may still
  // write into those that there are, the next are new ones: returns true. The old ones count as
  // held until all who have mapped them have let go.
  bool KeepFromOthers(scheduler::TrainerRank rank, const TrainerProcess& process);
  // `process` is about to map the rank's arenas.
  void GiveTo(scheduler::TrainerRank rank, TrainerProcessPtr process);
  // Of the rank's arenas that count as held though they are kept from its present process.
  [[nodiscard]] int64_t KeptBytes(scheduler::TrainerRank rank) const;
  // New pages with a header and zero words. The rank's old pages are poisoned first.
  // INVALID_ARGUMENT: more than wire::kBucketsMax buckets.
  absl::StatusOr<int> Timeline(scheduler::TrainerRank rank, uint32_t buckets);

  // Ends the waits of a rank's trainer, or of all, by poison in their `published` words. (Lanes
  // wait for the other words, and are told by commands.) Any process that maps the pages may do so
  // at any time.
  void Poison(scheduler::TrainerRank rank);
  void PoisonAll();
  // Ends all waits for weights of attempts until `awaited`, which is before `epoch`: the job goes
  // back. Words that are there already stay: nobody waits for them. The pages stay, too.
  void MarkRollback(uint32_t epoch, uint64_t awaited);

  // -1: not there.
  [[nodiscard]] int state_fd(scheduler::LaneIndex lane) const;
  [[nodiscard]] int staging_fd(scheduler::LaneIndex lane) const;
  [[nodiscard]] int table_fd(scheduler::LaneIndex lane) const;
  [[nodiscard]] int board_fd() const;
  [[nodiscard]] int host_copy_fd(scheduler::LaneIndex lane) const;
  [[nodiscard]] int arena_fd(scheduler::TrainerRank rank, uint32_t arena_id) const;
  [[nodiscard]] int timeline_fd(scheduler::TrainerRank rank) const;
  // The lane's state table as mapped here, size as allocated; shared, so that it outlives a
  // replacement. nullptr: not there.
  [[nodiscard]] std::shared_ptr<kernels::Mapping> table(scheduler::LaneIndex lane) const;
  [[nodiscard]] std::shared_ptr<kernels::Mapping> host_copy(scheduler::LaneIndex lane) const;
  [[nodiscard]] int64_t bytes() const;  // held now, in the devices' granules

 private:
  struct Block {
    wire::UniqueFd fd;
    int64_t bytes = 0;
    int64_t taken_bytes = 0;                    // of the device, in its granules
    std::shared_ptr<kernels::Mapping> mapping;  // host memory only
  };
  struct Lane {
    Block state;
    Block staging;
    Block table;
    Block host_copy;
  };
  struct Trainer {
    std::string device_uuid;  // where the arenas are
    std::map<uint32_t, Block> arenas;
    std::vector<TrainerProcessPtr> mapped_by;  // the arenas
    Block timeline;
    uint32_t buckets = 0;
  };
  // Arenas that no other process gets. They lie where a process maps them; here they are counted.
  struct Kept {
    scheduler::TrainerRank rank;
    int64_t taken_bytes = 0;
    std::vector<TrainerProcessPtr> mapped_by;
  };

  absl::StatusOr<Block> MakeHost(int64_t bytes, const std::string& what) DMUOND_EXCLUDES(mutex_);
  absl::StatusOr<Block> Make(kernels::MemoryHolder& holder, int64_t bytes, const std::string& what)
      DMUOND_EXCLUDES(mutex_);
  absl::Status Reserve(int64_t bytes, const std::string& what) DMUOND_EXCLUDES(mutex_);
  void Return(const Block& block) DMUOND_REQUIRES(mutex_);
  void ReturnArenas(Trainer& trainer) DMUOND_REQUIRES(mutex_);
  void ReturnKept() DMUOND_REQUIRES(mutex_);
  void Replace(Block& place, Block block) DMUOND_REQUIRES(mutex_);
  // By `value`, in the words that are not at `awaited` yet.
  static void EndWaits(const Trainer& trainer, uint64_t awaited, uint64_t value);
  [[nodiscard]] int LaneFd(scheduler::LaneIndex lane, Block Lane::*block) const
      DMUOND_EXCLUDES(mutex_);

  NodeDevice& device_;
  kernels::cpu::CpuMemoryHolder host_;
  const Options options_;

  mutable Mutex mutex_;
  int64_t bytes_ DMUOND_GUARDED_BY(mutex_) = 0;  // held, or reserved by an allocation under way
  std::map<scheduler::LaneIndex, Lane> lanes_ DMUOND_GUARDED_BY(mutex_);
  std::map<scheduler::TrainerRank, Trainer> trainers_ DMUOND_GUARDED_BY(mutex_);
  std::vector<Kept> kept_ DMUOND_GUARDED_BY(mutex_);
  Block board_ DMUOND_GUARDED_BY(mutex_);
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_MEMORY_JOB_MEMORY_H_
