// Arenas and timeline pages of the local trainers, mapped into the lane.
// Threads: the lane's dispatching thread.
#ifndef DMUOND_SERVER_LANE_TRAINER_MEMORY_H_
#define DMUOND_SERVER_LANE_TRAINER_MEMORY_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "base/unique_fd.h"
#include "dmuond/v1/lane.pb.h"
#include "dmuond/wire/timeline.h"
#include "kernels/device.h"
#include "server/lane/lane_job.h"

namespace dmuond::server::lane {

class TrainerMemory {
 public:
  struct Trainer {
    int32_t rank = 0;
    uint64_t incarnation = 0;
    struct ArenaMap {
      uint32_t id = 0;
      std::unique_ptr<kernels::Mapping> mapping;
    };
    std::vector<ArenaMap> arenas;
    std::unique_ptr<kernels::Mapping> timeline;
    wire::TimelinePage page{nullptr};
    uint32_t buckets = 0;
    bool poison_parameters = false;
    bool gone = false;  // it has died; its memory is still here
  };

  // `job` and `device` must outlive the object.
  TrainerMemory(const LaneJob& job, kernels::Device& device);

  // Maps a trainer of this node; replaces what an older incarnation of the rank had. Every slice
  // that the lane reads or writes must lie inside its arenas: INVALID_ARGUMENT naming parameter,
  // trainer and both numbers.
  absl::Status Attach(const v1::LaneCommand::AttachTrainer& attach,
                      const std::vector<wire::UniqueFd>& fds);
  // Unmaps it. A newer incarnation stays.
  void Detach(int32_t rank, uint64_t incarnation);
  // It has died. A newer incarnation has not.
  void OnGone(int32_t rank, uint64_t incarnation);

  // Null: not attached.
  [[nodiscard]] const Trainer* Find(int32_t rank) const { return by_rank_[rank].get(); }
  // Where a slice starts; null: the trainer is not attached.
  [[nodiscard]] std::byte* Address(int32_t rank, uint32_t arena, int64_t offset_bytes) const;
  [[nodiscard]] const std::vector<int32_t>& attached() const { return attached_; }
  // Whether a trainer of the node has nothing more to run for the attempt: its `submitted` word
  // says so, or it is gone or not attached.
  [[nodiscard]] bool IsThrough(int32_t rank, scheduler::Attempt attempt) const;

 private:
  absl::Status CheckSlices(int32_t rank, const Trainer& trainer) const;

  const LaneJob& job_;
  kernels::Device& device_;
  std::vector<std::unique_ptr<Trainer>> by_rank_;
  std::vector<int32_t> attached_;  // ranks, ascending
};

// Whether the other side has reached `value`; a poisoned word never does.
[[nodiscard]] inline bool Reached(const wire::TimelineWord& word, uint64_t value) {
  const uint64_t now = wire::Read(word);
  return now >= value && now < wire::kPoison;
}

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_TRAINER_MEMORY_H_
