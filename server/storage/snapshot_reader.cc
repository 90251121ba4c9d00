#include "server/storage/snapshot_reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/storage/manifest.h"
#include "server/storage/quote.h"
#include "server/storage/trainers_file.h"

namespace dmuond::server::storage {
namespace {

using scheduler::Box;
using scheduler::Extents;

std::optional<scheduler::UnitKind> KindOf(v1::Route route) {
  if (route == v1::ROUTE_MUON) return scheduler::UnitKind::kMatrix;
  if (route == v1::ROUTE_ADAMW) return scheduler::UnitKind::kPiece;
  return std::nullopt;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SnapshotReader>> SnapshotReader::Open(
    Storage& storage, v1::SnapshotManifest manifest) {
  std::unique_ptr<SnapshotReader> reader(new SnapshotReader(storage, std::move(manifest)));
  std::map<std::string, const v1::Parameter*> parameters;
  for (const v1::Parameter& parameter : reader->manifest_.parameters()) {
    parameters[parameter.name()] = &parameter;
  }
  const std::string directory =
      absl::StrCat(reader->manifest_.job(), "/", DirectoryName(IdOf(reader->manifest_)), "/");
  for (const v1::SnapshotFile& file : reader->manifest_.files()) {
    if (file.kind() != v1::SnapshotFile::KIND_STATE) continue;
    ASSIGN_OR_RETURN(std::unique_ptr<SafetensorsReader> opened,
                     SafetensorsReader::Open(storage, directory + file.name(), SummaryOf(file)));
    reader->files_.push_back(std::move(opened));
    RETURN_IF_ERROR(reader->AddFile(parameters, reader->files_.size() - 1));
  }
  return reader;
}

absl::Status SnapshotReader::AddFile(const std::map<std::string, const v1::Parameter*>& parameters,
                                     size_t file) {
  SafetensorsReader& reader = *files_[file];
  std::map<std::pair<std::string, std::string>, size_t> index;  // parameter, box: in saved_
  const size_t first = saved_.size();
  for (size_t i = 0; i < reader.header().tensors.size(); ++i) {
    const TensorInfo& tensor = reader.header().tensors[i];
    const auto lost = [&](const std::string& what) {
      return absl::DataLossError(
          absl::StrCat(reader.name(), ": tensor ", Quote(tensor.name), " ", what));
    };
    std::optional<TensorName> name = ParseTensorName(tensor.name);
    if (!name.has_value()) return lost("is not named like state");
    const auto parameter = parameters.find(name->parameter);
    if (parameter == parameters.end()) return lost("is of no parameter of the manifest");
    const std::optional<scheduler::UnitKind> kind = KindOf(parameter->second->route());
    if (!kind.has_value()) return lost("is of a parameter on route trainer");
    const Extents shape(parameter->second->shape().begin(), parameter->second->shape().end());
    const Box box = name->box.value_or(scheduler::WholeBox(shape));
    if (box.begin.size() != shape.size() || !scheduler::Contains(scheduler::WholeBox(shape), box)) {
      return lost(absl::StrCat("is not inside the shape ", scheduler::ShapeToString(shape)));
    }
    const auto [entry, added] =
        index.emplace(std::pair(name->parameter, scheduler::ToString(box)), saved_.size());
    if (added) {
      saved_.push_back({.kind = *kind, .parameter = name->parameter, .box = box, .file = file});
    }
    Saved& saved = saved_[entry->second];
    const bool count = name->kind == StateTensor::kUpdates;
    const std::span<const StateTensor> tensors = TensorsOf(*kind);
    if (!count && std::find(tensors.begin(), tensors.end(), name->kind) == tensors.end()) {
      return lost(absl::StrCat("does not go with route ", parameter->second->route()));
    }
    if (tensor.type != (count ? TensorType::kI64 : TensorType::kF32) ||
        tensor.shape != (count ? Extents() : scheduler::ShapeOf(box))) {
      return lost(absl::StrCat("has the type ", Name(tensor.type), " and the shape ",
                               scheduler::ShapeToString(tensor.shape)));
    }
    if (!saved.tensors.emplace(name->kind, i).second) return lost("is there twice");
    if (!count) continue;
    ASSIGN_OR_RETURN(std::vector<std::byte> bytes, reader.ReadTensor(i));
    std::memcpy(&saved.updates, bytes.data(), sizeof(saved.updates));
  }
  for (size_t i = first; i < saved_.size(); ++i) {
    if (saved_[i].tensors.size() == TensorsOf(saved_[i].kind).size() + 1) continue;
    return absl::DataLossError(
        absl::StrCat(reader.name(), ": parameter ", Quote(saved_[i].parameter), " box ",
                     scheduler::ToString(saved_[i].box), " has ", saved_[i].tensors.size(), " of ",
                     TensorsOf(saved_[i].kind).size() + 1, " tensors"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<scheduler::SavedUnit>> SnapshotReader::SavedUnits(
    const std::vector<scheduler::Parameter>& parameters) const {
  absl::flat_hash_map<std::string, int32_t> index;
  for (size_t i = 0; i < parameters.size(); ++i) {
    index.emplace(parameters[i].name, static_cast<int32_t>(i));
  }
  std::vector<scheduler::SavedUnit> units;
  units.reserve(saved_.size());
  for (const Saved& saved : saved_) {
    const auto found = index.find(saved.parameter);
    if (found == index.end()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "the snapshot has state of parameter ", Quote(saved.parameter), ", the job has none"));
    }
    units.push_back({.parameter = found->second,
                     .kind = saved.kind,
                     .box = saved.box,
                     .updates = saved.updates});
  }
  return units;
}

absl::Status SnapshotReader::Read(
    int32_t saved, StateTensor kind,
    absl::FunctionRef<void(int64_t offset, std::span<const std::byte> data)> take) {
  const Saved& unit = saved_[saved];
  return files_[unit.file]->ReadTensor(unit.tensors.at(kind), take);
}

absl::Status SnapshotReader::VerifyAll(absl::FunctionRef<bool(int64_t bytes)> go_on) {
  for (const std::unique_ptr<SafetensorsReader>& file : files_) {
    for (size_t i = 0; i < file->header().tensors.size(); ++i) {
      RETURN_IF_ERROR(
          file->ReadTensor(i, [](int64_t /*offset*/, std::span<const std::byte> /*data*/) {}));
      if (!go_on(file->header().tensors[i].end - file->header().tensors[i].begin)) {
        return absl::CancelledError(absl::StrCat(file->name(), " was not read to its end"));
      }
    }
  }
  return ReadTrainerStates(storage_, manifest_).status();
}

}  // namespace dmuond::server::storage
