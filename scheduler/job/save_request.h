// A caller's wish for a snapshot of the job's present state. It asks the coordinator for one, asks
// again if lanes that were to copy are replaced, and knows when the snapshot exists. A job that
// goes on from a snapshot and has not begun is saved already: by that one. Pure.
//
//   SaveRequest request;
//   auto done = request.Advance(job, actions);   // whenever HasNews(), until `done` has a value
#ifndef DMUOND_SCHEDULER_JOB_SAVE_REQUEST_H_
#define DMUOND_SCHEDULER_JOB_SAVE_REQUEST_H_

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "scheduler/job/node_job.h"

namespace dmuond::scheduler {

class SaveRequest {
 public:
  // REQUIRES: there is a job, which has or gets state.
  explicit SaveRequest(const NodeJob& job) : number_(job.number()) {}

  // The snapshot that holds the wanted state, or a later one. nullopt: it does not exist yet. An
  // error: the state was not saved, or the job has ended.
  [[nodiscard]] std::optional<absl::StatusOr<v1::SnapshotDone>> Advance(NodeJob& job,
                                                                        node::Actions& actions);
  // Advance() has something to do, or to say.
  [[nodiscard]] bool HasNews(const NodeJob& job) const;

 private:
  [[nodiscard]] bool Done(const NodeJob& job) const;
  [[nodiscard]] bool SameLanes(const NodeJob& job) const;
  uint64_t number_;  // of the job
  bool asked_ = false;
  uint64_t wanted_ = 0;  // the attempt whose state is to be saved
  uint32_t epoch_ = 0;   // in which it has asked
  uint64_t before_ = 0;  // how many snapshots were done when it asked
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_SAVE_REQUEST_H_
