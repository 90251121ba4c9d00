// A member may join only if it sees the coordinator's snapshot directory. This checks that it does.
// Blocking; no lock may be held.
#ifndef DMUOND_SERVER_DAEMON_GROUP_DIRECTORY_PROOF_H_
#define DMUOND_SERVER_DAEMON_GROUP_DIRECTORY_PROOF_H_

#include <functional>
#include <optional>

#include "absl/status/status.h"
#include "dmuond/v1/peer.pb.h"
#include "server/storage/storage.h"

namespace dmuond::server {

// The coordinator's side. `storage`: null where no snapshots are made. `ask` sends the proof and
// returns the member's answer, or nothing when it is gone. FAILED_PRECONDITION, reason
// SNAPSHOT_DIR_DIFFERS, names the node.
absl::Status ProveDirectory(
    storage::Storage* storage, const v1::JoinRequest& join,
    const std::function<std::optional<v1::DirectoryAnswer>(const v1::DirectoryProof&)>& ask);

// The member's side.
v1::DirectoryAnswer AnswerDirectory(storage::Storage* storage, int32_t node,
                                    const v1::DirectoryProof& proof);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_DIRECTORY_PROOF_H_
