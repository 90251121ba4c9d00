// The file of one lane: the state of the units that it owns. The writer takes units in the order in
// which they were declared (the lane's order of updates, say), and the tensors of a unit in the
// order of its slot.
//
//   StateFile file{.id = {attempt, step}, .job = "run7", .lane = lane, .units = …};
//   auto writer = CreateStateFile(storage, file);
//   for (unit …) for (StateTensor t : TensorsOf(kind)) writer->Append(bytes of the tensor);
//   absl::StatusOr<v1::SnapshotFile> record = writer->Finish();   // durable under its name
//
// The snapshot's directory was made by SnapshotStore::Prepare(). Threads: one at a time.
#ifndef DMUOND_SERVER_STORAGE_STATE_FILE_H_
#define DMUOND_SERVER_STORAGE_STATE_FILE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "dmuond/v1/snapshot.pb.h"
#include "scheduler/layout.h"
#include "scheduler/plan.h"
#include "server/storage/safetensors_writer.h"
#include "server/storage/snapshot_name.h"
#include "server/storage/storage.h"
#include "server/storage/tensor_name.h"

namespace dmuond::server::storage {

struct StateUnit {
  std::string parameter;
  scheduler::Extents parameter_shape;
  scheduler::UnitKind kind = scheduler::UnitKind::kMatrix;
  scheduler::Box box;
  uint64_t updates = 0;  // applied to it, this step's included
};

struct StateFile {
  SnapshotId id;
  std::string job;
  scheduler::LaneId lane;
  std::vector<StateUnit> units;
};

// A lane's units in update order, without their numbers of updates.
[[nodiscard]] std::vector<StateUnit> StateUnitsOf(const scheduler::Layout& layout,
                                                  const scheduler::Plan& plan,
                                                  const std::vector<scheduler::UnitId>& units);

// Writes any file of a snapshot under a temporary name; then makes it durable under its own.
class SnapshotFileWriter {
 public:
  // `tensors` need name, type and shape; kind and owner decide the file's name.
  static absl::StatusOr<std::unique_ptr<SnapshotFileWriter>> Create(
      Storage& storage, const std::string& job, const SnapshotId& id, v1::SnapshotFile::Kind kind,
      int32_t owner, std::vector<TensorInfo> tensors);

  // The next bytes, in order of the tensors. After an error every further call fails.
  absl::Status Append(std::span<const std::byte> data) { return writer_->Append(data); }
  // Syncs, renames, syncs the directory. What comes back goes into the manifest.
  absl::StatusOr<v1::SnapshotFile> Finish();

  [[nodiscard]] const SafetensorsWriter& writer() const { return *writer_; }

 private:
  SnapshotFileWriter(Storage& storage, std::string directory, v1::SnapshotFile::Kind kind,
                     int32_t owner, std::string name)
      : storage_(storage),
        directory_(std::move(directory)),
        kind_(kind),
        owner_(owner),
        name_(std::move(name)) {}

  Storage& storage_;
  const std::string directory_;
  const v1::SnapshotFile::Kind kind_;
  const int32_t owner_;
  const std::string name_;
  std::unique_ptr<SafetensorsWriter> writer_;
};

// The writer of a lane's file; the numbers of updates are written already, the fp32 tensors of
// `file.units` are to be appended.
absl::StatusOr<std::unique_ptr<SnapshotFileWriter>> CreateStateFile(Storage& storage,
                                                                    const StateFile& file);

}  // namespace dmuond::server::storage

#endif  // DMUOND_SERVER_STORAGE_STATE_FILE_H_
