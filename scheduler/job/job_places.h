// Which place of the group a job gets: node 0 decides, for all nodes. A job keeps the place that it
// has, and the one that it had last where nobody has taken that since. Else it gets a place that is
// free.
//
// A place is free when its coordinator has no job, and nobody has asked for it within `kept`: there
// is some time between a trainer's question and the job's first session.
//
// Pure: what the coordinators have is passed in. Threads: one at a time.
#ifndef DMUOND_SCHEDULER_JOB_JOB_PLACES_H_
#define DMUOND_SCHEDULER_JOB_JOB_PLACES_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "scheduler/step.h"

namespace dmuond::scheduler {

class JobPlaces {
 public:
  // This is what the coordinator of a place says of its job.
  struct Running {
    std::string job;     // empty: none
    uint64_t begun = 0;  // how many jobs it has begun
  };
  // REQUIRES: places > 0.
  JobPlaces(size_t places, std::chrono::milliseconds kept) : kept_(kept), last_(places) {}

  // `running`: by place. nullopt: no place is free.
  [[nodiscard]] std::optional<int32_t> Find(TimePoint now, const std::string& job,
                                            const std::vector<Running>& running);
  // Call it now and then, so that a place is free as soon as its job has ended.
  void Look(const std::vector<Running>& running);
  // A place is kept for the job, since somebody has asked and it has not begun.
  [[nodiscard]] bool Awaits(TimePoint now, const std::string& job) const;
  // By place: its job, or for whom it is kept; empty: it never had one.
  [[nodiscard]] std::vector<std::string> holders() const;

 private:
  struct Last {
    std::string job;         // that has been given the place; empty: none has
    TimePoint asked;         // when somebody asked for it
    uint64_t begun = 0;      // jobs, by then
    bool has_begun = false;  // since: it was seen to run, or is counted
    bool has_ended = false;  // and does not run any more
  };
  [[nodiscard]] bool IsFree(TimePoint now, size_t place, const std::vector<Running>& running) const;

  const std::chrono::milliseconds kept_;
  std::vector<Last> last_;  // by place
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_JOB_PLACES_H_
