// A snapshot that exists: what it holds, and its tensors, each proven by its checksum.
// Threads: one at a time.
#ifndef DMUOND_SERVER_STORAGE_SNAPSHOT_READER_H_
#define DMUOND_SERVER_STORAGE_SNAPSHOT_READER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "dmuond/v1/snapshot.pb.h"
#include "scheduler/layout.h"
#include "scheduler/restore_plan.h"
#include "server/storage/safetensors_reader.h"
#include "server/storage/storage.h"
#include "server/storage/tensor_name.h"

namespace dmuond::server::storage {

class SnapshotReader {
 public:
  // Opens all state files and reads their headers and numbers of updates. DATA_LOSS naming file and
  // tensor for what is not as the manifest says, or no state of one of its parameters. `storage`
  // must outlive the reader.
  static absl::StatusOr<std::unique_ptr<SnapshotReader>> Open(Storage& storage,
                                                              v1::SnapshotManifest manifest);

  [[nodiscard]] const v1::SnapshotManifest& manifest() const { return manifest_; }

  // What was saved; parameter indexes `parameters`. Input of scheduler::PlanRestore().
  // FAILED_PRECONDITION naming a parameter that is not among them. Those on route trainer, and
  // those of which nothing was saved, are passed over.
  absl::StatusOr<std::vector<scheduler::SavedUnit>> SavedUnits(
      const std::vector<scheduler::Parameter>& parameters) const;

  // One fp32 tensor of the unit with this index in SavedUnits(); as SafetensorsReader::ReadTensor.
  absl::Status Read(int32_t saved, StateTensor kind,
                    absl::FunctionRef<void(int64_t offset, std::span<const std::byte> data)> take);

  // Reads everything and compares every checksum, those of trainers' states too. `go_on` gets the
  // bytes of each tensor that was right; CANCELLED when it says false.
  absl::Status VerifyAll(absl::FunctionRef<bool(int64_t bytes)> go_on);

 private:
  struct Saved {
    scheduler::UnitKind kind = scheduler::UnitKind::kMatrix;
    std::string parameter;
    scheduler::Box box;
    uint64_t updates = 0;
    size_t file = 0;
    std::map<StateTensor, size_t> tensors;
  };
  SnapshotReader(Storage& storage, v1::SnapshotManifest manifest)
      : storage_(storage), manifest_(std::move(manifest)) {}
  absl::Status AddFile(const std::map<std::string, const v1::Parameter*>& parameters, size_t file);

  Storage& storage_;
  v1::SnapshotManifest manifest_;
  std::vector<std::unique_ptr<SafetensorsReader>> files_;
  std::vector<Saved> saved_;
};

}  // namespace dmuond::server::storage

#endif  // DMUOND_SERVER_STORAGE_SNAPSHOT_READER_H_
