#include "scheduler/job/refusals.h"

#include "absl/strings/str_cat.h"
#include "scheduler/reason.h"
#include "scheduler/shown_pid.h"

namespace dmuond::scheduler {

using absl::StatusCode;

absl::Status JobOfAnotherUser(const std::string& job, uint32_t owner, int32_t rank, uint32_t uid) {
  return Error(
      StatusCode::kPermissionDenied, "JOB_OF_ANOTHER_USER",
      Say("job '", Named("job", job), "' is that of uid ", Named("owner_uid", owner),
          ", and the trainer of rank ", Named("rank", rank), " is of uid ", Named("uid", uid),
          ": give its job a name of its own (job=, DMUOND_JOB), or start the daemons with "
          "--job_uids=",
          owner, ",", uid, ", which has these two users share their jobs"));
}

absl::Status OtherJob(const std::string& holder, const std::string& job) {
  return Error(StatusCode::kFailedPrecondition, "OTHER_JOB",
               Say("this daemon group runs job '", Named("holder", holder), "'; job '",
                   Named("job", job), "' must wait until it ends: `dmuonctl job end ", holder,
                   "` ends it now, `dmuonctl job end ", holder, " --save` with a snapshot"));
}

absl::Status WorldDiffers(const std::string& job, int32_t world_size, int32_t rank, int32_t given) {
  return Error(
      StatusCode::kFailedPrecondition, "WORLD_DIFFERS",
      Say("job '", Named("job", job), "' has world_size ", Named("world_size", world_size),
          ", rank ", Named("rank", rank), " says ", Named("given_world_size", given),
          ": start it with WORLD_SIZE=", world_size, ", or end the job first: `dmuonctl job end ",
          job, " --save` (it can go on from a snapshot with any number of ranks)"));
}

absl::Status JobHasState(const std::string& job, int64_t step, const std::string& whose) {
  return Error(StatusCode::kFailedPrecondition, "JOB_HAS_STATE",
               Say("job '", Named("job", job), "' has optimizer state at step ",
                   Named("last_committed_step", step), ", ", Named("whose", whose),
                   ": resume=\"if_present\" (DMUOND_RESUME=1) goes on with it, ", kBeginAnew,
                   ", another job name leaves it alone"));
}

absl::Status JobHasNoState(const std::string& job) {
  return Error(StatusCode::kFailedPrecondition, "JOB_HAS_NO_STATE",
               Say("job '", Named("job", job),
                   "' has no state to resume from: resume=\"if_present\" (DMUOND_RESUME=1) begins "
                   "it where there is none"));
}

absl::Status LaunchHasState(const std::string& job, const std::string& launch, int64_t step) {
  return Error(
      StatusCode::kFailedPrecondition, "JOB_HAS_STATE",
      Say("launch '", Named("launch", launch), "' has begun job '", Named("job", job),
          "' anew already, and it is at step ", Named("last_committed_step", step),
          ": resume=\"if_present\" (DMUOND_RESUME=1) goes on with it; a new start of all ranks "
          "says so by another DMUOND_LAUNCH"));
}

absl::Status JobInUse(const std::string& job, int32_t rank, int32_t live_rank,
                      const std::string& live) {
  return Error(
      StatusCode::kFailedPrecondition, "JOB_IN_USE",
      Say("rank ", Named("rank", rank), " is to begin job '", Named("job", job),
          "' anew, and rank ", Named("live_rank", live_rank), " ", Named("live", live),
          " of another start has a live session: end that process, or `dmuonctl job end ", job,
          "` ends its job (all ranks of one start say discard, and have one DMUOND_LAUNCH)"));
}

absl::Status RankTwice(const std::string& job, int32_t rank, int64_t pid,
                       const std::string& client) {
  return Error(StatusCode::kAlreadyExists, "RANK_TWICE",
               Say("rank ", Named("rank", rank), " of job '", Named("job", job),
                   "' has a live session already (", SayPid(pid), ", ", Named("client", client),
                   "): ", HowToEnd(pid, "kill"), ", or give this one a RANK of its own"));
}

absl::Status JobWasEnded(const std::string& job, int64_t step, const std::string& why) {
  return Error(StatusCode::kFailedPrecondition, kJobEnded,
               Say("job '", Named("job", job), "' ended after step ",
                   Named("last_committed_step", step), ": ", why));
}

absl::Status RankMoved(const std::string& job, int32_t rank, int32_t home, int32_t node) {
  return Error(absl::StatusCode::kFailedPrecondition, "RANK_MOVED",
               Say("rank ", Named("rank", rank), " of job '", Named("job", job),
                   "' belongs to node ", Named("home_node", home), ", this is node ",
                   Named("node", node), ": start its replacement there"));
}

absl::Status PredecessorRuns(int32_t rank, int64_t pid, const std::string& client) {
  return Error(StatusCode::kUnavailable, "PREDECESSOR_RUNS",
               Say("the last trainer of rank ", Named("rank", rank), " (", SayPid(pid), ", ",
                   Named("client", client),
                   ") has lost its session, but its process still runs and could write beside its "
                   "replacement: ",
                   HowToEnd(pid, "kill -9")));
}

absl::Status PredecessorUnseen(int32_t rank, int64_t kept_bytes, const absl::Status& why) {
  return Error(
      StatusCode::kResourceExhausted, "PREDECESSOR_UNSEEN",
      Say("a process that had rank ", Named("rank", rank), " before may still write into its ",
          Named("kept_bytes", kept_bytes),
          " bytes of arenas, for this daemon does not see that it has ended. So this one gets "
          "other arenas, and memory is short: ",
          MessageOf(why),
          ". End the old process where it runs; where daemon and trainers share a PID namespace "
          "(Kubernetes: shareProcessNamespace), and from Linux 6.5 on, its end is seen"));
}

absl::Status GivenUp(OutcomeReason why, const std::string& detail) {
  const char* reason = why == OutcomeReason::kTrainerMissing ? "TRAINER_LOST"
                       : why == OutcomeReason::kLaneLost     ? "LANE_LOST"
                                                             : "NODE_NOT_READY";
  return Error(absl::StatusCode::kUnavailable, reason, Message{detail, {}});
}

}  // namespace dmuond::scheduler
