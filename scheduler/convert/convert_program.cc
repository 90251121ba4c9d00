// A lane's program, to the lane and as the lane reads it.
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "dmuond/v1/lane_program.pb.h"
#include "scheduler/convert/convert.h"
#include "scheduler/state_slots.h"

namespace dmuond {
namespace {

using scheduler::BucketId;
using scheduler::LaneId;
using scheduler::NodeRank;
using scheduler::TrainerRank;
using scheduler::UnitId;
using scheduler::UnitKind;
using Wire = v1::LaneProgram;
using Numbers = google::protobuf::RepeatedField<int32_t>;

static_assert(static_cast<int>(UnitKind::kMatrix) == Wire::UNIT_KIND_MATRIX);
static_assert(static_cast<int>(UnitKind::kPiece) == Wire::UNIT_KIND_PIECE);

// What an enum of the wire has beyond those that the value has, CheckLaneProgram() refuses.
UnitKind KindOf(Wire::UnitKind kind) { return static_cast<UnitKind>(kind & 0xff); }
scheduler::ElementType TypeOf(v1::ElementType type) {
  return static_cast<scheduler::ElementType>(type & 0xff);
}
v1::ElementType OnTheWire(scheduler::ElementType type) {
  return static_cast<v1::ElementType>(type);
}

// ---- to the lane ----

void SetUnits(const std::vector<UnitId>& units, Numbers& out) {
  for (const UnitId id : units) out.Add(id.value());
}

void SetCell(const scheduler::LaneCell& cell, bool owned, Wire::Cell& out) {
  out.set_number(cell.number);
  *out.mutable_box() = ToProto(cell.box);
  for (const scheduler::CellLeaf& leaf : cell.leaves) {
    out.add_leaf_ranks(leaf.rank.value());
    owned ? out.add_leaf_nodes(leaf.node.value()) : out.add_leaf_places(leaf.place);
    out.add_leaf_fragments(leaf.fragment);
  }
  out.set_lowest_rank(cell.lowest.rank.value());
  out.set_lowest_node(cell.lowest.node.value());
  out.set_lowest_fragment(cell.lowest.fragment);
}

void SetUnit(const scheduler::LaneProgram& program, const scheduler::LaneUnit& of,
             Wire::Unit& out) {
  const scheduler::Unit& unit = of.unit;
  out.set_id(unit.id.value());
  out.set_kind(static_cast<Wire::UnitKind>(unit.kind));
  out.set_parameter(unit.parameter);
  *out.mutable_box() = ToProto(unit.box);
  out.set_rows(unit.rows);
  out.set_cols(unit.cols);
  out.set_first_element(unit.first_element);
  out.set_flat(unit.flat);
  out.set_bucket(unit.bucket.value());
  out.set_owner(unit.owner.value());
  for (const scheduler::LaneCell& cell : of.cells) {
    SetCell(cell, program.Owns(of), *out.add_cells());
  }
  out.mutable_holders()->Add(of.holders.begin(), of.holders.end());
  if (const scheduler::StagedUnit* staged = program.FindStaged(unit.id); staged != nullptr) {
    out.set_gradient_offset_bytes(staged->gradient_offset_bytes);
    out.set_weight_offset_bytes(staged->weight_offset_bytes);
  }
}

void SetTransfers(const std::vector<scheduler::Transfer>& transfers,
                  google::protobuf::RepeatedPtrField<Wire::Transfer>& out) {
  for (const scheduler::Transfer& transfer : transfers) {
    Wire::Transfer& to = *out.Add();
    to.set_unit(transfer.unit.value());
    to.set_from(transfer.from.value());
    to.set_to(transfer.to.value());
    *to.mutable_box() = ToProto(transfer.box);
    if (transfer.kind != scheduler::TransferKind::kWeight) to.set_cell(transfer.cell);
    if (transfer.kind == scheduler::TransferKind::kPartial) {
      to.set_first_leaf(transfer.subtree.first);
      to.set_leaves(transfer.subtree.leaves);
    }
    to.set_type(OnTheWire(transfer.type));
    to.set_bytes(transfer.bytes);
    to.set_offset_bytes(transfer.offset_bytes);
    to.set_in_place(transfer.in_place);
  }
}

// ---- as the lane reads it ----

absl::Status Refuse(const char* what, int64_t number) {
  return absl::InvalidArgumentError(absl::StrCat("a lane's program: ", what, " ", number));
}

template <typename Out>
absl::Status GetBox(const v1::Box& box, Out& out) {
  absl::StatusOr<scheduler::Box> read = FromProto(box);
  if (!read.ok()) return read.status();
  out.box = *std::move(read);
  return absl::OkStatus();
}

absl::Status GetSlice(const v1::Slice& slice, scheduler::Slice& out) {
  if (slice.strides_size() > scheduler::kDimsMax) return Refuse("strides", slice.strides_size());
  out.arena = slice.arena();
  out.offset_bytes = slice.offset_bytes();
  out.strides.assign(slice.strides().begin(), slice.strides().end());
  return absl::OkStatus();
}

std::vector<UnitId> GetUnits(const Numbers& units) {
  std::vector<UnitId> out;
  out.reserve(units.size());
  for (const int32_t unit : units) out.emplace_back(unit);
  return out;
}

absl::Status GetFragment(const Wire::Fragment& fragment, scheduler::Fragment& out) {
  out.rank = TrainerRank(fragment.rank());
  out.parameter = fragment.parameter();
  absl::Status status = GetBox(fragment.box(), out);
  status.Update(GetSlice(fragment.gradient(), out.gradient));
  status.Update(GetSlice(fragment.weight(), out.weight));
  return status;
}

absl::Status GetCell(const Wire::Cell& cell, bool owned, NodeRank node, scheduler::LaneCell& out) {
  out.number = cell.number();
  if (absl::Status status = GetBox(cell.box(), out); !status.ok()) return status;
  const int leaves = cell.leaf_ranks_size();
  const int others = owned ? cell.leaf_nodes_size() : cell.leaf_places_size();
  if (others != leaves || cell.leaf_fragments_size() != leaves) {
    return Refuse("lists of different length in cell", cell.number());
  }
  out.leaves.reserve(leaves);
  for (int i = 0; i < leaves; ++i) {
    out.leaves.push_back({owned ? i : cell.leaf_places(i), TrainerRank(cell.leaf_ranks(i)),
                          owned ? NodeRank(cell.leaf_nodes(i)) : node, cell.leaf_fragments(i)});
  }
  out.lowest = {0, TrainerRank(cell.lowest_rank()), NodeRank(cell.lowest_node()),
                cell.lowest_fragment()};
  return absl::OkStatus();
}

absl::Status GetUnit(const Wire::Unit& unit, scheduler::LaneProgram& program) {
  scheduler::LaneUnit& out = program.units.emplace_back();
  out.unit.id = UnitId(unit.id());
  out.unit.kind = KindOf(unit.kind());
  out.unit.parameter = unit.parameter();
  if (absl::Status status = GetBox(unit.box(), out.unit); !status.ok()) return status;
  out.unit.rows = unit.rows();
  out.unit.cols = unit.cols();
  out.unit.first_element = unit.first_element();
  out.unit.flat = unit.flat();
  out.unit.bucket = BucketId(unit.bucket());
  out.unit.owner = LaneId(unit.owner());
  const bool owned = program.Owns(out);
  out.cells.reserve(unit.cells_size());
  for (const Wire::Cell& cell : unit.cells()) {
    absl::Status status = GetCell(cell, owned, program.node, out.cells.emplace_back());
    if (!status.ok()) return status;
  }
  out.holders.assign(unit.holders().begin(), unit.holders().end());
  if (owned) {
    program.staged.push_back(
        {out.unit.id, unit.gradient_offset_bytes(), unit.weight_offset_bytes()});
  }
  return absl::OkStatus();
}

absl::Status GetTransfers(const google::protobuf::RepeatedPtrField<Wire::Transfer>& transfers,
                          scheduler::TransferKind kind, std::vector<scheduler::Transfer>& out) {
  out.reserve(transfers.size());
  for (const Wire::Transfer& transfer : transfers) {
    scheduler::Transfer& to = out.emplace_back();
    to.kind = kind;
    to.unit = UnitId(transfer.unit());
    to.from = LaneId(transfer.from());
    to.to = LaneId(transfer.to());
    if (absl::Status status = GetBox(transfer.box(), to); !status.ok()) return status;
    to.cell = transfer.cell();
    if (kind == scheduler::TransferKind::kPartial) {
      to.subtree.first = transfer.first_leaf();
      to.subtree.leaves = transfer.leaves();
    }
    to.type = TypeOf(transfer.type());
    to.offset_bytes = transfer.offset_bytes();
    to.in_place = transfer.in_place();
    to.bytes = transfer.bytes();
  }
  return absl::OkStatus();
}

}  // namespace

v1::LaneProgram ToProto(const scheduler::LaneProgram& program) {
  Wire out;
  out.set_lane(program.lane.value());
  out.set_nodes(program.nodes);
  out.set_lanes_per_node(program.lanes_per_node);
  out.set_world_size(program.world_size);
  for (const TrainerRank rank : program.trainers) out.add_trainers(rank.value());
  for (const TrainerRank rank : program.at_home) out.add_at_home(rank.value());
  out.set_plan_digest(program.plan_digest);
  out.set_plan_units(program.plan_units);
  for (const scheduler::LaneParameter& parameter : program.parameters) {
    Wire::Parameter& to = *out.add_parameters();
    to.set_index(parameter.index);
    to.set_name(parameter.name);
    to.set_weight_type(OnTheWire(parameter.weight_type));
    to.set_gradient_type(OnTheWire(parameter.gradient_type));
    to.set_group(parameter.group);
    to.set_reduce_factor(parameter.reduce_factor);
  }
  for (const scheduler::Fragment& fragment : program.fragments) {
    Wire::Fragment& to = *out.add_fragments();
    to.set_rank(fragment.rank.value());
    to.set_parameter(fragment.parameter);
    *to.mutable_box() = ToProto(fragment.box);
    *to.mutable_gradient() = ToProto(fragment.gradient);
    *to.mutable_weight() = ToProto(fragment.weight);
  }
  for (const scheduler::LaneUnit& of : program.units) SetUnit(program, of, *out.add_units());
  for (int32_t b = 0; b < program.buckets(); ++b) {
    Wire::Bucket& to = *out.add_buckets();
    to.mutable_publishers()->Add(program.publishers[b].begin(), program.publishers[b].end());
    SetTransfers(program.partials[b], *to.mutable_partials());
    SetTransfers(program.weights[b], *to.mutable_weights());
    SetTransfers(program.adopts[b], *to.mutable_adopts());
  }
  for (const scheduler::Batch& batch : program.batches) {
    Wire::Batch& to = *out.add_batches();
    to.set_kind(static_cast<Wire::UnitKind>(batch.kind));
    to.set_rows(batch.rows);
    to.set_cols(batch.cols);
    to.set_group(batch.group);
    to.set_weight_type(OnTheWire(batch.weight_type));
    SetUnits(batch.units, *to.mutable_units());
  }
  for (const scheduler::SlotClass& slots : program.slot_classes) {
    Wire::SlotClass& to = *out.add_slot_classes();
    to.set_elements(slots.elements);
    to.set_tensors(slots.tensors);
    to.set_offset_bytes(slots.offset_bytes);
    to.set_slots(slots.slots);
    SetUnits(slots.units, *to.mutable_units());
  }
  out.set_state_bytes(program.state_bytes);
  out.set_staging_bytes(program.staging_bytes);
  out.set_landing_bytes(program.landing_bytes);
  return out;
}

absl::StatusOr<scheduler::LaneProgram> FromProto(const v1::LaneProgram& program) {
  scheduler::LaneProgram out;
  out.lane = LaneId(program.lane());
  out.nodes = program.nodes();
  out.lanes_per_node = program.lanes_per_node();
  if (out.lanes_per_node < 1) return Refuse("lanes of a node:", out.lanes_per_node);
  out.node = NodeRank(program.lane() / out.lanes_per_node);
  out.rail = scheduler::LaneIndex(program.lane() % out.lanes_per_node);
  out.world_size = program.world_size();
  for (const int32_t rank : program.trainers()) out.trainers.emplace_back(rank);
  for (const int32_t rank : program.at_home()) out.at_home.emplace_back(rank);
  out.plan_digest = program.plan_digest();
  out.plan_units = program.plan_units();
  for (const Wire::Parameter& parameter : program.parameters()) {
    out.parameters.push_back({parameter.index(), parameter.name(), TypeOf(parameter.weight_type()),
                              TypeOf(parameter.gradient_type()), parameter.group(),
                              parameter.reduce_factor()});
  }
  absl::Status status;
  out.fragments.reserve(program.fragments_size());
  for (const Wire::Fragment& fragment : program.fragments()) {
    status.Update(GetFragment(fragment, out.fragments.emplace_back()));
  }
  out.units.reserve(program.units_size());
  for (const Wire::Unit& unit : program.units()) status.Update(GetUnit(unit, out));
  for (const Wire::Bucket& bucket : program.buckets()) {
    out.publishers.emplace_back(bucket.publishers().begin(), bucket.publishers().end());
    status.Update(GetTransfers(bucket.partials(), scheduler::TransferKind::kPartial,
                               out.partials.emplace_back()));
    status.Update(GetTransfers(bucket.weights(), scheduler::TransferKind::kWeight,
                               out.weights.emplace_back()));
    status.Update(
        GetTransfers(bucket.adopts(), scheduler::TransferKind::kAdopt, out.adopts.emplace_back()));
  }
  for (const Wire::Batch& batch : program.batches()) {
    out.batches.push_back({KindOf(batch.kind()), batch.rows(), batch.cols(), batch.group(),
                           TypeOf(batch.weight_type()), GetUnits(batch.units())});
  }
  for (const Wire::SlotClass& slots : program.slot_classes()) {
    if (slots.elements() < 0 || slots.elements() > scheduler::kElementsMax) {
      return Refuse("slots for tensors of", slots.elements());
    }
    const int64_t tensor_bytes = scheduler::TensorBytes(slots.elements());
    if (slots.tensors() < 0 || slots.tensors() > 3) return Refuse("tensors:", slots.tensors());
    out.slot_classes.push_back({slots.elements(), slots.tensors(), tensor_bytes,
                                slots.tensors() * tensor_bytes, slots.offset_bytes(), slots.slots(),
                                GetUnits(slots.units())});
  }
  out.state_bytes = program.state_bytes();
  out.staging_bytes = program.staging_bytes();
  out.landing_bytes = program.landing_bytes();
  if (status.ok()) status = CheckLaneProgram(out);
  if (!status.ok()) return status;
  return out;
}

}  // namespace dmuond
