// The coordinating node's side of all jobs of the group: a GroupJob for each, by the name that
// every message has. There are so many places for jobs; a session of one more job goes to the first
// place, which refuses it with the name of the job that it has.
//
// What no job is named in is for all of them: a node that leaves. The group's epoch is that of the
// links, in which all jobs begin; each has new lanes in epochs of its own after it.
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

  // As GroupJob's. A node tells a MemberState for each of its places; they are of use when all
  // nodes have.
  [[nodiscard]] GroupActions OnFormed(TimePoint now, uint32_t epoch);
  [[nodiscard]] GroupActions OnMessage(TimePoint now, int32_t from,
                                       const v1::MemberMessage& message);
  [[nodiscard]] GroupActions OnMemberGone(TimePoint now, int32_t node, const std::string& why);
  [[nodiscard]] GroupActions OnPlanMade(TimePoint now, const PlanOrder& order,
                                        absl::StatusOr<PlannedJob> made);
  [[nodiscard]] GroupActions OnTick(TimePoint now);
  [[nodiscard]] std::optional<TimePoint> due() const;
  [[nodiscard]] GroupActions OnDue(TimePoint now);
  // It is known what the group goes on with.
  [[nodiscard]] bool Formed() const;
  // Newest of the group's, and of its jobs'.
  [[nodiscard]] uint32_t epoch() const;

  // The machine of a job; null: there is none of that name.
  [[nodiscard]] const GroupJob* Find(absl::string_view name) const;

 private:
  struct Place {
    std::string name;  // of the job that it has, or had last
    GroupJob job;
  };
  // A job's; one that is free is its own from then on.
  [[nodiscard]] Place& PlaceOf(const std::string& name);
  [[nodiscard]] GroupActions OnMemberState(TimePoint now, int32_t from,
                                           const v1::MemberState& state);

  const int32_t nodes_;
  std::vector<Place> places_;
  std::map<int32_t, std::vector<v1::MemberState>> states_;  // by node, of the newest epoch
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_GROUP_JOBS_H_
