#include "tests/server/storage/snapshots.h"

#include <cstring>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/convert/convert.h"
#include "scheduler/restore_plan.h"
#include "server/storage/checksum.h"
#include "server/storage/host_copy.h"
#include "server/storage/layout_check.h"
#include "server/storage/manifest.h"
#include "server/storage/restore.h"
#include "server/storage/safetensors_header.h"
#include "server/storage/snapshot_reader.h"
#include "server/storage/state_file.h"
#include "server/storage/trainers_file.h"

namespace dmuond::server::storage::testing {
namespace {

using scheduler::LaneId;
using scheduler::Unit;
using scheduler::UnitId;

// Calls with (index in the unit's memory, index in the parameter) of every element.
template <typename Visit>
void ForEachElement(const scheduler::Extents& shape, const scheduler::Box& box, Visit&& visit) {
  const int64_t elements = scheduler::Elements(box);
  const scheduler::Extents inner = scheduler::RowMajorStrides(scheduler::ShapeOf(box));
  const scheduler::Extents outer = scheduler::RowMajorStrides(shape);
  for (int64_t i = 0; i < elements; ++i) {
    int64_t rest = i;
    int64_t global = 0;
    for (size_t d = 0; d < shape.size(); ++d) {
      global += (box.begin[d] + rest / inner[d]) * outer[d];
      rest %= inner[d];
    }
    visit(i, global);
  }
}

std::vector<float> TensorAt(const Job& job, const Unit& unit, StateTensor kind, int64_t step) {
  std::vector<float> values(scheduler::Elements(unit.box));
  ForEachElement(
      job.inputs.layout.parameters[unit.parameter].shape, unit.box,
      [&](int64_t i, int64_t global) { values[i] = ValueAt(step, unit.parameter, kind, global); });
  return values;
}

absl::StatusOr<v1::SnapshotFile> SaveLane(Storage& storage, const Job& job, LaneId lane,
                                          int64_t step) {
  absl::StatusOr<scheduler::LaneProgram> program =
      scheduler::MakeLaneProgram(job.inputs, job.plan, lane);
  if (!program.ok()) return program.status();
  const HostCopy copy = PlaceHostCopy(*program);
  StateFile file{.id = IdAt(step),
                 .job = job.base.job(),
                 .lane = lane,
                 .units = StateUnitsOf(job.inputs.layout, job.plan, copy.units)};
  // What the lane copies of its slots.
  std::vector<std::byte> memory(copy.bytes());
  for (size_t i = 0; i < copy.units.size(); ++i) {
    const Unit& unit = job.plan.units[copy.units[i].value()];
    file.units[i].updates = UpdatesAt(step, unit.parameter);
    int64_t at = copy.unit_offset_bytes[i];
    for (StateTensor kind : TensorsOf(unit.kind)) {
      const std::vector<float> values = TensorAt(job, unit, kind, step);
      std::memcpy(memory.data() + at, values.data(), values.size() * sizeof(float));
      at += static_cast<int64_t>(values.size() * sizeof(float));
    }
  }
  // What the daemon writes, batch by batch.
  absl::StatusOr<std::unique_ptr<SnapshotFileWriter>> writer = CreateStateFile(storage, file);
  if (!writer.ok()) return writer.status();
  for (size_t b = 0; b + 1 < copy.batch_offset_bytes.size(); ++b) {
    absl::Status status = (*writer)->Append(std::span(memory).subspan(
        copy.batch_offset_bytes[b], copy.batch_offset_bytes[b + 1] - copy.batch_offset_bytes[b]));
    if (!status.ok()) return status;
  }
  return (*writer)->Finish();
}

}  // namespace

Job JobOf(const std::string& name, scheduler::PlanInputs inputs,
          const google::protobuf::RepeatedPtrField<v1::GroupConfig>& groups) {
  Job job;
  job.inputs = std::move(inputs);
  job.plan = scheduler::MakePlan(job.inputs).value();
  job.base.set_version("0.1.0");
  job.base.set_job(name);
  job.base.set_job_incarnation(1);
  job.base.set_world_size(static_cast<int32_t>(job.inputs.layout.trainers.size()));
  v1::SnapshotPlan& plan = *job.base.mutable_plan();
  plan.set_nodes(job.inputs.nodes);
  plan.set_lanes_per_node(job.inputs.lanes_per_node);
  plan.set_bucket_bytes(job.inputs.bucket_bytes);
  *plan.mutable_costs() = ToProto(job.inputs.costs);
  plan.set_digest(job.plan.digest);
  SetLayout(job.inputs.layout.parameters, groups, job.base).IgnoreError();
  return job;
}

Job PlanFor(const scheduler::testing::World& world) {
  v1::SnapshotManifest groups;
  groups.add_groups();
  return JobOf(kJob, world.Inputs().value(), groups.groups());
}

Job MakeJob(int32_t trainers, int32_t nodes, int32_t lanes_per_node, bool wide) {
  using scheduler::testing::AdamW;
  using scheduler::testing::Muon;
  scheduler::testing::World world(trainers, nodes, lanes_per_node);
  world.Replicate(Muon("layers.0.attention/wq", {6, 10}))
      .ShardRows(Muon("layers.0.mlp", {12, 7}))
      .Replicate(Muon("experts", {3, 4, 5}))
      .Replicate(AdamW("norm", {13}))
      .ShardRows(AdamW("embedding", {11, 3}))
      .Replicate(AdamW("temperature", {}));
  if (wide) world.Replicate(AdamW("head", {1024, 320}));
  return PlanFor(world);
}

float ValueAt(int64_t step, int32_t parameter, StateTensor kind, int64_t element) {
  const int64_t mixed =
      (step * 31 + parameter * 13 + static_cast<int64_t>(kind) * 7) * 1000 + element;
  return static_cast<float>(mixed % 65521);
}
uint64_t UpdatesAt(int64_t step, int32_t parameter) { return step - parameter % 3; }
std::string TrainerStateAt(int64_t step, int32_t rank) {
  if (rank == 1) return "";
  return absl::StrCat("rank ", rank, " after step ", step, std::string(rank, '\0'));
}

SnapshotId IdAt(int64_t step) {
  return {scheduler::MakeAttempt(scheduler::GroupEpoch(1), static_cast<uint32_t>(step)),
          scheduler::StepId(step)};
}

absl::Status Save(Storage& storage, const Job& job, int64_t step) {
  absl::StatusOr<SnapshotStore> store = SnapshotStore::Create(storage, job.base.job());
  if (!store.ok()) return store.status();
  v1::SnapshotManifest manifest = job.base;
  manifest.set_step(step);
  manifest.set_attempt(IdAt(step).attempt.value());
  const int32_t per_node = (job.base.world_size() + job.inputs.nodes - 1) / job.inputs.nodes;
  for (int32_t node = 0; node < job.inputs.nodes; ++node) {
    if (absl::Status status = store->Prepare(IdAt(step)); !status.ok()) return status;
    for (int32_t lane = 0; lane < job.inputs.lanes_per_node; ++lane) {
      absl::StatusOr<v1::SnapshotFile> record =
          SaveLane(storage, job, LaneId(node * job.inputs.lanes_per_node + lane), step);
      if (!record.ok()) return record.status();
      *manifest.add_files() = *std::move(record);
    }
    TrainerStates states;
    for (int32_t rank = node * per_node;
         rank < std::min((node + 1) * per_node, job.base.world_size()); ++rank) {
      states[scheduler::TrainerRank(rank)] = TrainerStateAt(step, rank);
    }
    absl::StatusOr<v1::SnapshotFile> record =
        WriteTrainersFile(storage, job.base.job(), IdAt(step), scheduler::NodeRank(node), states);
    if (!record.ok()) return record.status();
    *manifest.add_files() = *std::move(record);
  }
  return store->Commit(manifest);
}

std::optional<v1::SnapshotFile> RecordOf(const std::string& name, v1::SnapshotFile::Kind kind,
                                         int32_t owner, const std::string& file) {
  const auto bytes = std::as_bytes(std::span<const char>(file));
  const auto size = static_cast<int64_t>(bytes.size());
  if (size < kLengthBytes) return std::nullopt;
  const auto json = JsonBytes(bytes.first<kLengthBytes>(), size);
  if (!json.ok()) return std::nullopt;
  const int64_t header_bytes = *json + kLengthBytes;
  const auto header = ParseHeader(bytes.subspan(kLengthBytes, *json), size - header_bytes);
  if (!header.ok()) return std::nullopt;
  FileSummary summary{.bytes = size,
                      .header_bytes = header_bytes,
                      .header_checksum = ChecksumOf(bytes.first(header_bytes))};
  for (const TensorInfo& tensor : header->tensors) {
    summary.tensor_checksums.push_back(
        ChecksumOf(bytes.subspan(header_bytes + tensor.begin, tensor.end - tensor.begin)));
  }
  return ToRecord(name, kind, owner, summary);
}

absl::Status RestoreAndCompare(Storage& storage, const v1::SnapshotManifest& manifest,
                               const Job& job) {
  const int64_t step = manifest.step();
  absl::StatusOr<std::unique_ptr<SnapshotReader>> reader = SnapshotReader::Open(storage, manifest);
  if (!reader.ok()) return reader.status();
  const auto saved = (*reader)->SavedUnits(job.inputs.layout.parameters);
  if (!saved.ok()) return saved.status();
  const auto plan = scheduler::PlanRestore(job.inputs.layout, job.plan, *saved);
  if (!plan.ok()) return plan.status();

  using Key = std::pair<UnitId, StateTensor>;
  std::map<Key, std::vector<float>> memory;
  for (int32_t lane = 0; lane < job.lanes(); ++lane) {
    absl::Status status =
        Restore(**reader, *saved, job.plan, plan->lanes[lane],
                [&](UnitId id, StateTensor kind) -> absl::StatusOr<std::span<float>> {
                  std::vector<float>& values = memory[{id, kind}];
                  values.resize(scheduler::Elements(job.plan.units[id.value()].box), -1.0F);
                  return std::span<float>(values);
                });
    if (!status.ok()) return status;
  }
  for (const Unit& unit : job.plan.units) {
    const std::string& name = job.inputs.layout.parameters[unit.parameter].name;
    if (plan->updates[unit.id.value()] != UpdatesAt(step, unit.parameter)) {
      return absl::InternalError(
          absl::StrCat(name, ": ", plan->updates[unit.id.value()], " updates after step ", step));
    }
    for (StateTensor kind : TensorsOf(unit.kind)) {
      if (memory[{unit.id, kind}] == TensorAt(job, unit, kind, step)) continue;
      return absl::InternalError(absl::StrCat(name, "/", Name(kind), " ",
                                              scheduler::ToString(unit.box),
                                              " is not that of step ", step));
    }
  }
  absl::StatusOr<TrainerStates> states = ReadTrainerStates(storage, manifest);
  if (!states.ok()) return states.status();
  for (int32_t rank = 0; rank < manifest.world_size(); ++rank) {
    if ((*states)[scheduler::TrainerRank(rank)] == TrainerStateAt(step, rank)) continue;
    return absl::InternalError(absl::StrCat("trainer ", rank, "'s state is not of step ", step));
  }
  return absl::OkStatus();
}

}  // namespace dmuond::server::storage::testing
