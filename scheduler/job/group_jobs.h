// All jobs of the group, on the coordinating node: a GroupJob for each. A message goes to the one
// that it names; a message that names none, of a node that leaves, goes to all. The number of
// places for jobs is fixed. A session of one job too many goes to the first place, which refuses it
// with the name of the job that it holds.
//
// The links' epoch is the group's. All jobs begin in it, and each may start new lanes in later
// epochs of its own.
//
// Threads: one at a time.
#ifndef DMUOND_SCHEDULER_JOB_GROUP_JOBS_H_
#define DMUOND_SCHEDULER_JOB_GROUP_JOBS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "scheduler/job/group_job.h"

namespace dmuond::scheduler {

class GroupJobs {
 public:
  // REQUIRES: places > 0, the same on every node.
  explicit GroupJobs(const GroupJobOptions& options, size_t places = 1);

  // As GroupJob's. A node sends a MemberState for each of its places; no job gets any of them
  // before all nodes have sent theirs.
  [[nodiscard]] GroupActions OnFormed(TimePoint now, uint32_t epoch);
  [[nodiscard]] GroupActions OnMessage(TimePoint now, int32_t from,
                                       const v1::MemberMessage& message);
  [[nodiscard]] GroupActions OnMemberGone(TimePoint now, int32_t node, const std::string& why);
  [[nodiscard]] GroupActions OnPlanMade(TimePoint now, const PlanOrder& order,
                                        absl::StatusOr<PlannedJob> made);
  [[nodiscard]] GroupActions OnTick(TimePoint now);
  [[nodiscard]] std::optional<TimePoint> due() const;
  [[nodiscard]] GroupActions OnDue(TimePoint now);
  // Every node has said what it has, and it is known which jobs go on.
  [[nodiscard]] bool Formed() const;
  // The newest epoch, of the group and of its jobs.
  [[nodiscard]] uint32_t epoch() const;

  // The job of the first place; empty: it has none.
  [[nodiscard]] std::string name() const { return places_.front().job.name(); }
  // Null: there is no job of this name.
  [[nodiscard]] const GroupJob* Find(absl::string_view name) const;

 private:
  struct Place {
    std::string name;  // of its present job, or of the last one
    GroupJob job;
  };
  // The place of a job; a job that has none takes a free one.
  [[nodiscard]] Place& PlaceOf(const std::string& name);
  [[nodiscard]] GroupActions OnMemberState(TimePoint now, int32_t from,
                                           const v1::MemberState& state);

  const int32_t nodes_;
  std::vector<Place> places_;
  std::map<int32_t, std::vector<v1::MemberState>> states_;  // by node, of the newest epoch
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_GROUP_JOBS_H_
