// What one lane does: cut out of the plan for it alone, so that neither its size nor the time to
// make something of it grows with the job, only with the lane's own part.
//
//   absl::StatusOr<LaneProgram> program = MakeLaneProgram(inputs, plan, LaneId(3));  // a daemon
//   absl::Status sound = CheckLaneProgram(received);                                 // its lane
//
// Units and parameters keep the numbers that they have in the plan and in the layout: the daemon
// names them so in commands, absences and decisions. Fragments have numbers of the program's own.
#ifndef DMUOND_SCHEDULER_LANE_PROGRAM_H_
#define DMUOND_SCHEDULER_LANE_PROGRAM_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "scheduler/layout.h"
#include "scheduler/transfers.h"
#include "scheduler/types.h"
#include "scheduler/unit.h"

namespace dmuond::scheduler {

// Matrices of one shape, or pieces, that are updated together: they need as many free slots at once
// as they are units.
struct Batch {
  UnitKind kind = UnitKind::kMatrix;
  int64_t rows = 0;  // matrices only; pieces of a batch may differ in size
  int64_t cols = 0;
  int32_t group = 0;  // kMatrix: all of a batch share muon configuration, i.e. group
  ElementType weight_type = ElementType::kF32;
  std::vector<UnitId> units;
};

// Slots of one size class of a lane's state memory: `slots` places of `slot_bytes` from
// `offset_bytes` (a multiple of kAlignment, as is slot_bytes). A matrix slot holds momentum then
// master, a piece slot m, v, master: fp32 tensors of the unit's rows*cols elements, contiguous, one
// every tensor_bytes. There are as many spare slots (slots - units) as the largest number of the
// class's units in one batch. Small pieces may live in a class of somewhat larger ones.
struct SlotClass {
  int64_t elements = 0;      // room of one tensor in the slot: the largest unit's rows*cols
  int32_t tensors = 2;       // matrix 2, piece 3
  int64_t tensor_bytes = 0;  // distance between the tensors of a slot: elements * 4, aligned
  int64_t slot_bytes = 0;    // tensors * tensor_bytes
  int64_t offset_bytes = 0;
  int32_t slots = 0;
  std::vector<UnitId> units;  // units whose state lives in this class
};

// Placement of an owned unit in the lane's staging memory; both in the order of ViewInUnit().
struct StagedUnit {
  UnitId unit;
  int64_t gradient_offset_bytes = 0;  // fp32: the reduced gradient, kept until the update is done
  int64_t weight_offset_bytes = 0;    // weight type: what is published
};

// What the lane has to know of a parameter.
struct LaneParameter {
  int32_t index = 0;  // into Layout::parameters
  std::string name;
  ElementType weight_type = ElementType::kF32;
  ElementType gradient_type = ElementType::kF32;
  int32_t group = 0;
  double reduce_factor = 1;
};

// A trainer's fragment in the summation tree of a cell.
struct CellLeaf {
  int32_t place = 0;  // in the tree
  TrainerRank rank;
  NodeRank node;          // of the trainer
  int32_t fragment = -1;  // into LaneProgram::fragments; -1: of another node's trainer
};

// A cell (Plan::cells) as far as the lane has a part in it.
struct LaneCell {
  int32_t number = 0;  // among the cells of its unit in the plan: Transfer::cell
  Box box;
  // By place. Of an owned unit all leaves, of another one those of the node's trainers.
  std::vector<CellLeaf> leaves;
  CellLeaf lowest;  // whose weights are the first ones; its place is 0
};

struct LaneUnit {
  Unit unit;                    // `batch` is -1 where the lane does not own it
  std::vector<LaneCell> cells;  // by number
  // Into LaneProgram::fragments: which of the node's trainers get its weights from this lane.
  Indices holders;
};

// Everything the lane process needs, in the order in which it does it. Units of the lane's rail:
// those it owns, and those that other nodes' lanes on the same rail own and whose fragments live on
// this node. Lists of transfers are subsequences of one order that all lanes of the rail share
// (bucket, unit, cell, place in the tree), so grouped sends and receives of a bucket pair up.
struct LaneProgram {
  LaneId lane;
  NodeRank node;
  LaneIndex rail;
  int32_t nodes = 1;
  int32_t lanes_per_node = 1;
  int32_t world_size = 0;
  std::vector<TrainerRank> trainers;      // of the lane's node, ascending
  std::vector<TrainerRank> at_home;       // of these, on the lane's own device; ascending
  uint64_t plan_digest = 0;               // of the plan that it was cut out of
  int32_t plan_units = 0;                 // of all lanes
  std::vector<LaneParameter> parameters;  // of its units, by index
  std::vector<Fragment> fragments;        // what it reads or writes of the node's trainers
  std::vector<LaneUnit> units;            // by id
  std::vector<Indices> publishers;        // per bucket: the node's lanes that publish to it
  // On the way to the lane Transfer::subtree loses level and node, which follow from the leaves.
  std::vector<std::vector<Transfer>> partials;  // per bucket: gradients to owners on other nodes
  std::vector<std::vector<Transfer>> weights;   // per bucket: new weights from owners
  std::vector<std::vector<Transfer>> adopts;    // per bucket: first weights to owners; once per job
  std::vector<Batch> batches;                   // owned, in update order
  std::vector<SlotClass> slot_classes;
  std::vector<StagedUnit> staged;  // owned units, sorted by unit
  int64_t state_bytes = 0;
  int64_t staging_bytes = 0;  // staged units, the transfers' memory and the landing
  // The landing is the end of staging memory: room for gradients of trainers of the node that are
  // not at home here, for all of them or for PlanInputs::landing_bytes_max.
  int64_t landing_bytes = 0;

  [[nodiscard]] int32_t buckets() const { return static_cast<int32_t>(publishers.size()); }
  // Whether the gradient is a trainer's of this node, but of another device.
  [[nodiscard]] bool IsFarAway(const CellLeaf& leaf) const;
  // Null: the lane has no part in it.
  [[nodiscard]] const LaneUnit* Find(UnitId id) const;
  [[nodiscard]] const LaneParameter* FindParameter(int32_t index) const;
  [[nodiscard]] const StagedUnit* FindStaged(UnitId id) const;  // null: not owned
  [[nodiscard]] bool Owns(const LaneUnit& of) const { return of.unit.owner == lane; }
};

// Null: the lane has no part in it.
[[nodiscard]] const LaneCell* FindCell(const LaneUnit& of, int32_t number);
// The leaves of a subtree: fewer than it has where the cell does not list them all.
[[nodiscard]] std::span<const CellLeaf> LeavesOf(const LaneCell& cell, const Subtree& subtree);
// Of a bucket's list, those of one unit. REQUIRES: the list is sorted by unit, as all of them are.
[[nodiscard]] std::span<const Transfer> TransfersOfUnit(const std::vector<Transfer>& transfers,
                                                        UnitId unit);

// Where in staging memory an owner's message lies that needs no packing: in its unit's new weight.
// REQUIRES: the lane owns the unit, and the transfer's box lies in it.
[[nodiscard]] int64_t OffsetInPlace(const LaneProgram& program, const LaneUnit& of,
                                    const Transfer& transfer);

struct Plan;
struct PlanInputs;

// INVALID_ARGUMENT: there is no such lane.
[[nodiscard]] absl::StatusOr<LaneProgram> MakeLaneProgram(const PlanInputs& inputs,
                                                          const Plan& plan, LaneId lane);

// Whether a program that came from elsewhere can be followed: every index leads somewhere, every
// box lies in what holds it, and all memory that is named lies within state_bytes and
// staging_bytes. INVALID_ARGUMENT says what does not. That places in memory do not overlap, and
// that other lanes' programs fit, is not looked at: the bits would be wrong, and nothing worse.
[[nodiscard]] absl::Status CheckLaneProgram(const LaneProgram& program);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_LANE_PROGRAM_H_
