// What the trainers of a job say of their parameters: names, shapes, and which box of which
// parameter each trainer holds. One idea covers data, FSDP, tensor, expert and pipeline parallel:
// boxes.
//
// Everything here is a value; no threads, no ownership of memory.
#ifndef DMUOND_SCHEDULER_LAYOUT_H_
#define DMUOND_SCHEDULER_LAYOUT_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "scheduler/box.h"
#include "scheduler/types.h"

namespace dmuond::scheduler {

enum class Route : uint8_t { kMuon = 1, kAdamW = 2, kTrainer = 3 };
enum class ElementType : uint8_t { kF32 = 1, kBF16 = 2, kF16 = 3 };  // values as in kernels::DType
enum class Contribution : uint8_t {
  kSum = 1,   // added over all holders that say so
  kSame = 2,  // equal at all holders: the lowest rank's is taken
  kNone = 3   // not read: equals that of another holder, which says kSum
};
[[nodiscard]] const char* Name(Route route);
[[nodiscard]] const char* Name(ElementType type);           // "float32", "bfloat16", "float16"
[[nodiscard]] const char* Name(Contribution contribution);  // "sum", "same", "none"
[[nodiscard]] int64_t SizeOf(ElementType type);

// Which logical 2-D matrices a muon parameter consists of.
struct MatrixView {
  enum class Kind : uint8_t {
    kWhole = 1,  // a 2-D parameter is one matrix; leading dimensions of a deeper one are a batch
    kRowBlocks = 2,  // consecutive blocks of rows (fused QKV): `row_blocks`, summing to all rows
    kHeads = 3       // `heads` equal blocks of rows
  };
  Kind kind = Kind::kWhole;
  std::vector<int64_t> row_blocks;
  int64_t heads = 0;
  bool operator==(const MatrixView&) const = default;
};

// A logical tensor; equal on all trainers that register its name.
struct Parameter {
  std::string name;
  Extents shape;
  ElementType weight_type = ElementType::kF32;
  ElementType gradient_type = ElementType::kF32;
  Route route = Route::kMuon;
  std::string route_reason;  // shown in the routing table
  MatrixView view;           // muon only
  int32_t group = 0;         // index of its hyperparameter group
  double reduce_factor = 1;  // multiplies the reduced gradient
  int32_t ready_order = 0;   // parameters whose gradients are ready earlier have smaller numbers
  bool held_by_all = false;  // reduce_factor is right only where every rank holds all of it
};

// Where a trainer keeps one box of a tensor: element strides in an arena, outermost dimension
// first.
struct Slice {
  uint32_t arena = 0;
  int64_t offset_bytes = 0;
  Extents strides;
  bool operator==(const Slice&) const = default;
};

// What one trainer holds of a parameter.
struct Fragment {
  TrainerRank rank;
  int32_t parameter = 0;  // index into Layout::parameters
  Box box;
  Contribution contribution = Contribution::kSum;
  Slice gradient;
  Slice weight;
};

// Where a trainer keeps a fragment.
struct Places {
  Slice gradient;
  Slice weight;
  bool operator==(const Places&) const = default;
  template <typename H>
  friend H AbslHashValue(H state, const Places& places) {
    for (const Slice* slice : {&places.gradient, &places.weight}) {
      state = H::combine(std::move(state), slice->arena, slice->offset_bytes, slice->strides);
    }
    return state;
  }
};

// A fragment in the layout of a whole job. Trainers of one model keep theirs in equal places, and a
// job has a million fragments: Layout::places says each of them once.
struct LayoutFragment {
  TrainerRank rank;
  int32_t parameter = 0;  // index into Layout::parameters
  Box box;
  Contribution contribution = Contribution::kSum;
  int32_t places = 0;  // index into Layout::places
};

struct Trainer {
  TrainerRank rank;
  NodeRank node;
  LaneIndex home;  // the lane of the trainer's own device; any lane of its node where it has none
};

// A whole job. Parameters in registration order of the lowest rank that holds each; fragments
// sorted by (parameter, rank, box begin).
struct Layout {
  std::vector<Trainer> trainers;  // sorted by rank, complete: 0 … world-1
  std::vector<Parameter> parameters;
  std::vector<LayoutFragment> fragments;
  std::vector<Places> places;

  // All that is known of a fragment.
  [[nodiscard]] Fragment FragmentAt(size_t index) const {
    const LayoutFragment& of = fragments[index];
    const Places& where = places[of.places];
    return {of.rank, of.parameter, of.box, of.contribution, where.gradient, where.weight};
  }
};

// What one trainer registers, before it is merged with the others'.
struct Registration {
  TrainerRank rank;
  NodeRank node;
  LaneIndex home;
  std::vector<Parameter> parameters;
  std::vector<Fragment> fragments;  // `parameter` indexes this registration's own parameters
};

// Checks one registration by itself (shapes, boxes inside shapes, strides, names unique, views,
// ranges, weights that share memory with anything); errors are INVALID_ARGUMENT naming parameter
// and trainer. Of parameters on route kTrainer only name, shape and boxes are looked at: their
// slices may be left empty.
[[nodiscard]] absl::Status Validate(const Registration& registration);
// The same of the fragments alone: enough where another registration with these parameters, and as
// many fragments of each, has been validated.
[[nodiscard]] absl::Status ValidateFragments(const Registration& registration);

// Merges the registrations of all ranks of a world and checks the whole (fails closed, naming the
// parameter, both trainers and both values): same name, other shape, dtype, route, view, group,
// factor or contribution; SUM boxes may coincide or overlap across ranks, SAME boxes likewise, one
// rank's own boxes of a parameter must not overlap; together the boxes of a parameter must cover
// its shape. NONE goes with SUM, and what a NONE box covers, a SUM box covers too. What one trainer
// takes to be held by all ranks must be. A rank twice, or one missing (FAILED_PRECONDITION; all
// missing ranks are named). The order of `registrations` does not matter. Where trainers give a
// parameter other reasons or ready orders, the lowest rank's count.
[[nodiscard]] absl::Status MergeRegistrations(const std::vector<Registration>& registrations,
                                              int32_t world_size, Layout& layout);

// The same, one registration after the other: a world's registrations together are many times its
// layout.
//
//   RegistrationMerger merger(world_size);
//   for (…) indices = merger.Add(registration);
//   absl::Status status = merger.Finish(layout);
class RegistrationMerger {
 public:
  explicit RegistrationMerger(int32_t world_size) : world_size_(world_size) {}

  // Returns the index in the layout of each of its parameters. REQUIRES: it is valid, and its rank
  // not below that of the one before.
  [[nodiscard]] absl::StatusOr<std::vector<int32_t>> Add(const Registration& registration);
  // One whose parameters are those of an earlier one, for which Add() returned `indices`.
  void AddLike(const std::vector<int32_t>& indices, const Registration& registration);
  // Once, when all are added. `layout` stays as it is where the whole is refused.
  [[nodiscard]] absl::Status Finish(Layout& layout);

 private:
  const int32_t world_size_;
  Layout layout_;                                       // but for the fragments
  std::vector<std::vector<LayoutFragment>> fragments_;  // per parameter of the layout, by rank
  absl::flat_hash_map<std::string, int32_t> index_;
  absl::flat_hash_map<Places, int32_t> places_;  // into layout_.places
  std::vector<TrainerRank> first_rank_;          // per parameter of the layout
};

// Bytes of the arena that a slice of `box` touches: offset + extent, overflow-checked. Used against
// the arena's size. INVALID_ARGUMENT when it overflows.
[[nodiscard]] absl::Status SliceEnd(const Slice& slice, const Box& box, ElementType type,
                                    int64_t& end_bytes);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_LAYOUT_H_
