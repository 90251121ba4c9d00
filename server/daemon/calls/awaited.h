// Whom the job waits for, as this node knows it; for trainers that wait, and for status.
#ifndef DMUOND_SERVER_DAEMON_CALLS_AWAITED_H_
#define DMUOND_SERVER_DAEMON_CALLS_AWAITED_H_

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "dmuond/v1/types.pb.h"
#include "google/protobuf/repeated_field.h"
#include "server/daemon/core.h"

namespace dmuond::server {

// Adds nothing where nobody has been waited for during the last seconds.
void FillAwaited(Core& core, google::protobuf::RepeatedPtrField<v1::Awaited>& awaited)
    DMUOND_REQUIRES(core.mutex);

// For RANKS_MISSING: "rank 3 (pid 4711 on node 0), which has not registered", as the coordinator
// has told, or else "ranks 1, 3": those for which `has_come` is false, as far as this node knows.
// `has_come` gets null where the rank has no session here. REQUIRES: there is a job.
std::string MissingRanks(Core& core,
                         const std::function<bool(const scheduler::RankTable::Session*)>& has_come)
    DMUOND_REQUIRES(core.mutex);

// GROUP_NOT_FORMED, with who is missing as far as this node knows: "the daemon of node 1", say, or
// why this node has not joined.
absl::Status GroupNotFormed(const Core& core);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_AWAITED_H_
