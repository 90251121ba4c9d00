// The file with the trainer states of one node's ranks: what each submitted with the step (data
// positions, RNG states).
#ifndef DMUOND_SERVER_STORAGE_TRAINERS_FILE_H_
#define DMUOND_SERVER_STORAGE_TRAINERS_FILE_H_

#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/v1/snapshot.pb.h"
#include "scheduler/types.h"
#include "server/storage/snapshot_name.h"
#include "server/storage/storage.h"

namespace dmuond::server::storage {

// By rank, opaque bytes; ranks that submitted none are not in it.
using TrainerStates = std::map<scheduler::TrainerRank, std::string>;

// Writes the file and makes it durable under its name.
absl::StatusOr<v1::SnapshotFile> WriteTrainersFile(Storage& storage, const std::string& job,
                                                   const SnapshotId& id, scheduler::NodeRank node,
                                                   const TrainerStates& states);

// Reads the states of all files of a snapshot, each proven by its checksum. DATA_LOSS naming the
// file for what is no trainer's state, or a rank that is there twice or not in the world.
absl::StatusOr<TrainerStates> ReadTrainerStates(Storage& storage,
                                                const v1::SnapshotManifest& manifest);

}  // namespace dmuond::server::storage

#endif  // DMUOND_SERVER_STORAGE_TRAINERS_FILE_H_
