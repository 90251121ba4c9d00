// Who gets which trainer_state where a job goes on from a snapshot.
#ifndef DMUOND_SCHEDULER_JOB_SAVED_TRAINER_STATE_H_
#define DMUOND_SCHEDULER_JOB_SAVED_TRAINER_STATE_H_

#include <cstdint>
#include <string>

#include "scheduler/job/node_job.h"

namespace dmuond::scheduler {

// What the rank gave with the snapshot's step. A rank that the world of then did not have gets what
// rank 0 gave: learning rates and the like are the same on all.
[[nodiscard]] inline std::string SavedTrainerState(const ResumePoint& from, int32_t rank) {
  const auto kept = from.trainers.find(TrainerRank(rank < from.manifest.world_size() ? rank : 0));
  return kept == from.trainers.end() ? "" : kept->second;
}

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_SAVED_TRAINER_STATE_H_
