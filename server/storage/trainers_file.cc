#include "server/storage/trainers_file.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "server/storage/manifest.h"
#include "server/storage/quote.h"
#include "server/storage/safetensors_reader.h"
#include "server/storage/state_file.h"

namespace dmuond::server::storage {
namespace {

constexpr char kPrefix[] = "trainer_state/";

absl::Status AddStates(SafetensorsReader& reader, int32_t world_size, TrainerStates& states) {
  for (size_t i = 0; i < reader.header().tensors.size(); ++i) {
    const TensorInfo& tensor = reader.header().tensors[i];
    absl::string_view rest = tensor.name;
    int32_t rank = -1;
    if (tensor.type != TensorType::kU8 || !absl::ConsumePrefix(&rest, kPrefix) ||
        !absl::SimpleAtoi(rest, &rank) || rank < 0 || rank >= world_size) {
      return absl::DataLossError(
          absl::StrCat(reader.name(), ": tensor ", Quote(tensor.name), " (", Name(tensor.type),
                       ") is not the state of a trainer of 0 … ", world_size - 1));
    }
    ASSIGN_OR_RETURN(std::vector<std::byte> bytes, reader.ReadTensor(i));
    std::string state(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if (!states.emplace(scheduler::TrainerRank(rank), std::move(state)).second) {
      return absl::DataLossError(
          absl::StrCat(reader.name(), ": the state of trainer ", rank, " is there twice"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::SnapshotFile> WriteTrainersFile(Storage& storage, const std::string& job,
                                                   const SnapshotId& id, scheduler::NodeRank node,
                                                   const TrainerStates& states) {
  std::vector<TensorInfo> tensors;
  for (const auto& [rank, state] : states) {
    tensors.push_back({.name = absl::StrCat(kPrefix, rank.value()),
                       .type = TensorType::kU8,
                       .shape = {static_cast<int64_t>(state.size())}});
  }
  ASSIGN_OR_RETURN(std::unique_ptr<SnapshotFileWriter> writer,
                   SnapshotFileWriter::Create(storage, job, id, v1::SnapshotFile::KIND_TRAINERS,
                                              node.value(), std::move(tensors)));
  for (const auto& [rank, state] : states) {
    RETURN_IF_ERROR(writer->Append(std::as_bytes(std::span<const char>(state))));
  }
  return writer->Finish();
}

absl::StatusOr<TrainerStates> ReadTrainerStates(Storage& storage,
                                                const v1::SnapshotManifest& manifest) {
  TrainerStates states;
  for (const v1::SnapshotFile& file : manifest.files()) {
    if (file.kind() != v1::SnapshotFile::KIND_TRAINERS) continue;
    ASSIGN_OR_RETURN(
        std::unique_ptr<SafetensorsReader> reader,
        SafetensorsReader::Open(
            storage,
            absl::StrCat(manifest.job(), "/", DirectoryName(IdOf(manifest)), "/", file.name()),
            SummaryOf(file)));
    RETURN_IF_ERROR(AddStates(*reader, manifest.world_size(), states));
  }
  return states;
}

}  // namespace dmuond::server::storage
