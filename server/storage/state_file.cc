#include "server/storage/state_file.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/storage/manifest.h"

namespace dmuond::server::storage {

std::vector<StateUnit> StateUnitsOf(const scheduler::Layout& layout, const scheduler::Plan& plan,
                                    const std::vector<scheduler::UnitId>& units) {
  std::vector<StateUnit> out;
  out.reserve(units.size());
  for (scheduler::UnitId id : units) {
    const scheduler::Unit& unit = plan.units[id.value()];
    const scheduler::Parameter& parameter = layout.parameters[unit.parameter];
    out.push_back({.parameter = parameter.name,
                   .parameter_shape = parameter.shape,
                   .kind = unit.kind,
                   .box = unit.box});
  }
  return out;
}

absl::StatusOr<std::unique_ptr<SnapshotFileWriter>> SnapshotFileWriter::Create(
    Storage& storage, const std::string& job, const SnapshotId& id, v1::SnapshotFile::Kind kind,
    int32_t owner, std::vector<TensorInfo> tensors) {
  RETURN_IF_ERROR(CheckJobName(job));
  std::unique_ptr<SnapshotFileWriter> file(new SnapshotFileWriter(
      storage, absl::StrCat(job, "/", DirectoryName(id)), kind, owner,
      kind == v1::SnapshotFile::KIND_STATE ? StateFileName(scheduler::LaneId(owner))
                                           : TrainersFileName(scheduler::NodeRank(owner))));
  const std::string temporary = absl::StrCat(file->directory_, "/", file->name_, kTemporarySuffix);
  // An earlier try of the same file may have ended without a word.
  if (absl::Status status = storage.Remove(temporary); !status.ok() && !absl::IsNotFound(status)) {
    return status;
  }
  ASSIGN_OR_RETURN(file->writer_,
                   SafetensorsWriter::Create(storage, temporary,
                                             {{"dmuond_format", absl::StrCat(kManifestFormat)},
                                              {"job", job},
                                              {"step", absl::StrCat(id.step.value())},
                                              {"attempt", absl::StrCat(id.attempt.value())}},
                                             std::move(tensors)));
  return file;
}

absl::StatusOr<v1::SnapshotFile> SnapshotFileWriter::Finish() {
  ASSIGN_OR_RETURN(FileSummary summary, writer_->Finish());
  const std::string path = absl::StrCat(directory_, "/", name_);
  RETURN_IF_ERROR(storage_.Rename(absl::StrCat(path, kTemporarySuffix), path));
  RETURN_IF_ERROR(storage_.SyncDirectory(directory_));
  return ToRecord(name_, kind_, owner_, summary);
}

absl::StatusOr<std::unique_ptr<SnapshotFileWriter>> CreateStateFile(Storage& storage,
                                                                    const StateFile& file) {
  std::vector<TensorInfo> tensors;
  std::vector<int64_t> updates;
  // 8-byte values first: then every tensor is aligned to its type, however odd the boxes are.
  for (const StateUnit& unit : file.units) {
    tensors.push_back({.name = TensorNameOf(unit.parameter, unit.parameter_shape,
                                            StateTensor::kUpdates, unit.box),
                       .type = TensorType::kI64});
    updates.push_back(static_cast<int64_t>(unit.updates));
  }
  for (const StateUnit& unit : file.units) {
    for (StateTensor kind : TensorsOf(unit.kind)) {
      tensors.push_back({.name = TensorNameOf(unit.parameter, unit.parameter_shape, kind, unit.box),
                         .type = TensorType::kF32,
                         .shape = scheduler::ShapeOf(unit.box)});
    }
  }
  ASSIGN_OR_RETURN(
      std::unique_ptr<SnapshotFileWriter> writer,
      SnapshotFileWriter::Create(storage, file.job, file.id, v1::SnapshotFile::KIND_STATE,
                                 file.lane.value(), std::move(tensors)));
  RETURN_IF_ERROR(writer->Append(std::as_bytes(std::span<const int64_t>(updates))));
  return writer;
}

}  // namespace dmuond::server::storage
