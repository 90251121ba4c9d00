// Somebody wants the job's state, as it is now, in a snapshot: asks for one, again where lanes that
// were to copy are replaced, and says when it exists. Pure.
//
//   SaveRequest request;
//   auto done = request.Advance(job, actions);   // whenever HasNews(), until it has a value
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

  // The snapshot that has the state of when it was asked for, or of later; nullopt: not yet. An
  // error: it was not saved, or the job has ended.
  [[nodiscard]] std::optional<absl::StatusOr<v1::SnapshotDone>> Advance(NodeJob& job,
                                                                        node::Actions& actions);
  // Advance() has something to do, or to say.
  [[nodiscard]] bool HasNews(const NodeJob& job) const;

 private:
  [[nodiscard]] bool Done(const NodeJob& job) const;
  [[nodiscard]] bool SameLanes(const NodeJob& job) const;
  uint64_t number_;  // of the job
  bool asked_ = false;
  uint64_t wanted_ = 0;  // attempt whose state is to be saved
  uint32_t epoch_ = 0;   // in which it was asked for
  uint64_t before_ = 0;  // snapshots that were done by then
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_SAVE_REQUEST_H_
