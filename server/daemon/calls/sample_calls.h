// Calls of operators for how orthogonal the updates of matrices are.
//
// Threads: any; they block, and compute.
#ifndef DMUOND_SERVER_DAEMON_CALLS_SAMPLE_CALLS_H_
#define DMUOND_SERVER_DAEMON_CALLS_SAMPLE_CALLS_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "dmuond/v1/admin.pb.h"
#include "scheduler/plan.h"
#include "server/daemon/core.h"

namespace dmuond::server {

class SampleCalls {
 public:
  explicit SampleCalls(Core& core) : core_(core) {}

  // A matrix's masters before and after its update are copied to the host, in the step in which it
  // happens, for which the lane's next batch waits: 8 bytes an element. The rest is this thread's
  // work.
  absl::StatusOr<v1::SampleUpdatesReply> SampleUpdates(const v1::SampleUpdatesRequest& request,
                                                       const Core::Cancelled& cancelled);

 private:
  // Returns the matrices that the request means.
  absl::StatusOr<std::vector<scheduler::UnitId>> Chosen(const v1::SampleUpdatesRequest& request,
                                                        const scheduler::PlannedJob& planned) const;
  // Waits for a step to update the matrix, and measures that. DEADLINE_EXCEEDED: none has come.
  absl::StatusOr<v1::SampleUpdatesReply::Row> Sample(
      scheduler::UnitId id, const std::shared_ptr<const scheduler::Plan>& plan,
      Core::Deadline deadline, const Core::Cancelled& cancelled) DMUOND_EXCLUDES(core_.mutex);

  Core& core_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_SAMPLE_CALLS_H_
