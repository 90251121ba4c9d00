// Errors for a trainer that cannot join a job. Each message names both sides, and ends with the
// command or argument that helps: DMUOND_RESUME and `dmuonctl job end`, which are the same for
// Python and C++.
#ifndef DMUOND_SCHEDULER_JOB_REFUSALS_H_
#define DMUOND_SCHEDULER_JOB_REFUSALS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "scheduler/step.h"

namespace dmuond::scheduler {

// The reason of errors about a job that somebody has ended.
inline constexpr char kJobEnded[] = "JOB_ENDED";

// The advice to begin the job anew, as a part of a message.
inline constexpr char kBeginAnew[] = "resume=\"discard\" (DMUOND_RESUME=discard) begins it anew";

// The job belongs to another user (job_uids.h); `uid` is that of the trainer of `rank`.
[[nodiscard]] absl::Status JobOfAnotherUser(const std::string& job, uint32_t owner, int32_t rank,
                                            uint32_t uid);
[[nodiscard]] absl::Status OtherJob(const std::string& holder, const std::string& job);
[[nodiscard]] absl::Status WorldDiffers(const std::string& job, int32_t world_size, int32_t rank,
                                        int32_t given);
// `whose`: where the state is, and of which job, for somebody who has not made it.
[[nodiscard]] absl::Status JobHasState(const std::string& job, int64_t step,
                                       const std::string& whose);
[[nodiscard]] absl::Status JobHasNoState(const std::string& job);
// This launch has begun the job anew already, and the job has state since.
[[nodiscard]] absl::Status LaunchHasState(const std::string& job, const std::string& launch,
                                          int64_t step);
// `live_rank` has a session; `live` says where: "(pid 4711)", "on node 1".
[[nodiscard]] absl::Status JobInUse(const std::string& job, int32_t rank, int32_t live_rank,
                                    const std::string& live);
[[nodiscard]] absl::Status RankTwice(const std::string& job, int32_t rank, int64_t pid,
                                     const std::string& client);
// Somebody has ended the job; for the trainers that were in it.
[[nodiscard]] absl::Status JobWasEnded(const std::string& job, int64_t step,
                                       const std::string& why);
// The rank's trainer must be started on node `home`.
[[nodiscard]] absl::Status RankMoved(const std::string& job, int32_t rank, int32_t home,
                                     int32_t node);
[[nodiscard]] absl::Status PredecessorRuns(int32_t rank, int64_t pid, const std::string& client);
// `why`: memory is short for a second set of arenas. The first, of `kept_bytes`, is kept from a
// replacement, because a process that had the rank before may still write there.
[[nodiscard]] absl::Status PredecessorUnseen(int32_t rank, int64_t kept_bytes,
                                             const absl::Status& why);
// A rank, a lane or a node is missing for good; for trainers that have submitted nothing.
[[nodiscard]] absl::Status GivenUp(OutcomeReason why, const std::string& detail);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_REFUSALS_H_
