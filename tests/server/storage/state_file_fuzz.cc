// A lane's file out of nowhere, under a manifest that vouches for every byte of it: reading its
// header, taking it for a snapshot's state and restoring it ends with a status, and never
// otherwise.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "scheduler/restore_plan.h"
#include "server/storage/checksum.h"
#include "server/storage/manifest.h"
#include "server/storage/restore.h"
#include "server/storage/safetensors_header.h"
#include "server/storage/snapshot_reader.h"
#include "tests/server/storage/fault_storage.h"
#include "tests/server/storage/snapshots.h"

namespace dmuond::server::storage::testing {
namespace {

// Never false; abort() is how a fuzzer hears of it.
void Require(bool condition) {
  if (!condition) std::abort();
}

// What CheckPlaces promises, and that what is read can be written and read again.
void CheckHeader(const SafetensorsHeader& header, int64_t data_bytes) {
  int64_t end = 0;
  for (const TensorInfo& tensor : header.tensors) {
    Require(tensor.begin == end && tensor.end >= tensor.begin && tensor.end <= data_bytes);
    end = tensor.end;
  }
  Require(end == data_bytes);
  const absl::StatusOr<std::string> text = EncodeHeader(header);
  Require(text.ok());
  const auto bytes = std::as_bytes(std::span<const char>(*text));
  const absl::StatusOr<SafetensorsHeader> again =
      ParseHeader(bytes.subspan(kLengthBytes), data_bytes);
  Require(again.ok() && *again == header);
}

void TryRestore(const std::string& file, const v1::SnapshotFile& record) {
  static const Job* const job = new Job(MakeJob(1, 1, 1));
  v1::SnapshotManifest manifest = job->base;
  manifest.set_step(1);
  manifest.set_attempt(IdAt(1).attempt.value());
  *manifest.add_files() = record;
  FaultStorage storage(1);
  SnapshotStore store = SnapshotStore::Create(storage, kJob).value();
  Require(store.Prepare(IdAt(1)).ok());
  const std::string path = store.PathOf(IdAt(1)) + "/" + record.name();
  Require(storage.Create(path).ok());
  storage.SetContents(path, file);

  const auto reader = SnapshotReader::Open(storage, manifest);
  if (!reader.ok()) return;
  const auto saved = (*reader)->SavedUnits(job->inputs.layout.parameters);
  if (!saved.ok()) return;
  const auto plan = scheduler::PlanRestore(job->inputs.layout, job->plan, *saved);
  if (!plan.ok()) return;
  std::vector<float> memory;
  const absl::Status restored = Restore(
      **reader, *saved, job->plan, plan->lanes[0], [&](scheduler::UnitId id, StateTensor /*kind*/) {
        memory.resize(scheduler::Elements(job->plan.units[id.value()].box));
        return std::span<float>(memory);
      });
  Require(restored.ok());
}

void Try(const std::string& file) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span<const char>(file));
  if (bytes.size() < kLengthBytes) return;
  const auto json = JsonBytes(bytes.first<kLengthBytes>(), static_cast<int64_t>(bytes.size()));
  if (!json.ok()) return;
  const int64_t header_bytes = *json + kLengthBytes;
  const int64_t data_bytes = static_cast<int64_t>(bytes.size()) - header_bytes;
  const auto header = ParseHeader(bytes.subspan(kLengthBytes, *json), data_bytes);
  if (!header.ok()) return;
  CheckHeader(*header, data_bytes);
  TryRestore(file,
             *RecordOf(StateFileName(scheduler::LaneId(0)), v1::SnapshotFile::KIND_STATE, 0, file));
}

}  // namespace
}  // namespace dmuond::server::storage::testing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string file(reinterpret_cast<const char*>(data), size);
  using dmuond::server::storage::testing::Try;
  Try(file);
  // And once more with a length word that fits, since few mutations leave it right: the JSON ends
  // where the data of the same input would begin.
  if (const size_t end = file.rfind("}}"); end != std::string::npos && end >= 8) {
    uint64_t length = end + 2 - 8;
    for (size_t i = 0; i < 8; ++i, length >>= 8) file[i] = static_cast<char>(length & 0xff);
    Try(file);
  }
  return 0;
}
