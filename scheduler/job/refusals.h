// What somebody hears who comes to a job at a bad time: each message names both sides, and ends
// with the command or argument that helps. What users write is the same for Python and C++:
// DMUOND_RESUME and `dmuonctl job end`.
#ifndef DMUOND_SCHEDULER_JOB_REFUSALS_H_
#define DMUOND_SCHEDULER_JOB_REFUSALS_H_

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace dmuond::scheduler {

// The reason of what ends because its job was ended on purpose.
inline constexpr char kJobEnded[] = "JOB_ENDED";

// A client that carries resume as DMUOND_RESUME has it.
inline constexpr char kBeginAnew[] = "resume=\"discard\" (DMUOND_RESUME=discard) begins it anew";

[[nodiscard]] absl::Status OtherJob(const std::string& holder, const std::string& job);
[[nodiscard]] absl::Status WorldDiffers(const std::string& job, int32_t world_size, int32_t rank,
                                        int32_t given);
[[nodiscard]] absl::Status JobHasState(const std::string& job, int64_t step);
[[nodiscard]] absl::Status JobHasNoState(const std::string& job);
// The job has been begun anew by this launch, and has come to a step since.
[[nodiscard]] absl::Status LaunchHasState(const std::string& job, const std::string& launch,
                                          int64_t step);
// `live`: of a rank that has a session: "(pid 4711)", "on node 1".
[[nodiscard]] absl::Status JobInUse(const std::string& job, int32_t rank, int32_t live_rank,
                                    const std::string& live);
[[nodiscard]] absl::Status RankTwice(const std::string& job, int32_t rank, pid_t pid,
                                     const std::string& client);
// On purpose, for who was in it.
[[nodiscard]] absl::Status JobWasEnded(const std::string& job, int64_t step,
                                       const std::string& why);
// Its trainer must be started on `home`.
[[nodiscard]] absl::Status RankMoved(const std::string& job, int32_t rank, int32_t home,
                                     int32_t node);
[[nodiscard]] absl::Status PredecessorRuns(int32_t rank, pid_t pid);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_REFUSALS_H_
