// Proof that all daemons of a group see one snapshot directory, made when they join: each reads
// what the coordinator has put there, and the coordinator reads what each has put there in turn.
//
//   coordinator                                  member
//   DirectoryProof proof = Begin(storage, name, secret);
//   sends proof.name ───────────────────────────→ AnswerProof(storage, name, node)
//   CheckAnswer(storage, proof, node);  ←──────── "answered"
//   EndProof(storage, proof, node);
//
// The secret travels by the directory alone. Threads: any.
#ifndef DMUOND_SERVER_STORAGE_SHARED_DIRECTORY_H_
#define DMUOND_SERVER_STORAGE_SHARED_DIRECTORY_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "scheduler/types.h"
#include "server/storage/storage.h"

namespace dmuond::server::storage {

struct DirectoryProof {
  std::string name;    // of the file
  std::string secret;  // what it holds
};

// `nonce` and `secret` are random, and never used twice.
absl::StatusOr<DirectoryProof> BeginProof(Storage& storage, uint64_t nonce, uint64_t secret);

// Writes the secret, as found, into this member's own file beside it. FAILED_PRECONDITION naming
// both directories (`coordinators`: node 0's) where the proof is not in this one, in words that are
// the same at each try; INVALID_ARGUMENT for a name that is none.
absl::Status AnswerProof(Storage& storage, const std::string& name, scheduler::NodeRank node,
                         const std::string& coordinators);

// FAILED_PRECONDITION names the directory and the node whose answer is missing or wrong. A network
// file system may show a new file late: call it again before giving up.
absl::Status CheckAnswer(Storage& storage, const DirectoryProof& proof, scheduler::NodeRank node);

// Removes the proof and the node's answer.
void EndProof(Storage& storage, const DirectoryProof& proof, scheduler::NodeRank node);

// Removes the files of proofs that never ended.
absl::Status RemoveOldProofs(Storage& storage);

}  // namespace dmuond::server::storage

#endif  // DMUOND_SERVER_STORAGE_SHARED_DIRECTORY_H_
