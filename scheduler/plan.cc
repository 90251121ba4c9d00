// MakePlan(): units, owners, batches, cells, one after the other.
#include "scheduler/plan.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/assignment.h"
#include "scheduler/batches.h"
#include "scheduler/buckets.h"
#include "scheduler/digest.h"
#include "scheduler/lane_memory.h"
#include "scheduler/matrix_view.h"
#include "scheduler/pieces.h"
#include "scheduler/placement.h"
#include "scheduler/reason.h"
#include "scheduler/replicated.h"
#include "scheduler/state_slots.h"
#include "scheduler/unit_cells.h"

namespace dmuond::scheduler {
namespace {

// How much of a matrix's time may be given away for smaller batches. Between nodes a bucket's
// weights cross when all of its matrices are done, which are in a batch for each shape: batches
// that take in many buckets leave the rails nothing to do before the last one ends.
constexpr double kSlackOfOneNode = 0.01;
constexpr double kSlackOfSeveral = 0.07;

absl::Status CheckCosts(const CostTable& costs) {
  for (const auto& [name, value] :
       {std::pair("tflops", costs.tflops),
        std::pair("gigabytes_per_second", costs.gigabytes_per_second)}) {
    if (!std::isfinite(value) || value <= 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("cost table: ", name, " is ", value, ", and must be above 0"));
    }
  }
  for (const auto& [name, value] :
       {std::pair("launch_us", costs.launch_us),
        std::pair("piece_bytes_per_element", costs.piece_bytes_per_element),
        std::pair("matrix_bytes_per_element", costs.matrix_bytes_per_element)}) {
    if (!std::isfinite(value) || value < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("cost table: ", name, " is ", value, ", and must not be below 0"));
    }
  }
  for (const CostEntry& entry : costs.entries) {
    if (IsPossible(entry)) continue;
    const auto& [rows, cols, iteration] = entry.matrix;
    return absl::InvalidArgumentError(absl::StrCat(
        "cost table: ", rows, "x", cols, " batch ", entry.batch, " takes ", entry.microseconds,
        " us in ", iteration.steps, " steps and ", iteration.rounds, " rounds"));
  }
  return absl::OkStatus();
}

// The parameters up to this one have so many of something, and no job may have as many.
absl::Status TooMany(const Parameter& parameter, const char* name, int64_t count, const char* what,
                     int64_t at_most) {
  return Error(
      absl::StatusCode::kInvalidArgument, "LAYOUT_INVALID",
      Say("up to parameter '", Named("parameter", parameter.name), "' of shape ",
          Named("shape", ShapeToString(parameter.shape)), " the job has ", Named(name, count), " ",
          what, "; at most ", Named("at_most", at_most), " are allowed"));
}

absl::Status CheckInputs(const PlanInputs& inputs) {
  if (inputs.nodes < 1 || inputs.lanes_per_node < 1 ||
      int64_t{inputs.nodes} * inputs.lanes_per_node > kLanesMax) {
    return absl::InvalidArgumentError(absl::StrCat(inputs.nodes, " nodes of ",
                                                   inputs.lanes_per_node, " lanes; 1 to ",
                                                   kLanesMax, " lanes in all are possible"));
  }
  if (inputs.memory_granule_bytes < 1 || inputs.memory_granule_bytes > kMemoryGranuleMax) {
    return absl::InvalidArgumentError(absl::StrCat("memory in granules of ",
                                                   inputs.memory_granule_bytes, " bytes; 1 to ",
                                                   kMemoryGranuleMax, " are possible"));
  }
  if (inputs.lane_memory_bytes < 0 || inputs.bucket_bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat("negative lane memory ",
                                                   inputs.lane_memory_bytes, " or bucket size ",
                                                   inputs.bucket_bytes));
  }
  for (const Trainer& trainer : inputs.layout.trainers) {
    if (trainer.node.value() < 0 || trainer.node.value() >= inputs.nodes) {
      return absl::InvalidArgumentError(absl::StrCat("trainer ", trainer.rank.value(),
                                                     " is on node ", trainer.node.value(), " of ",
                                                     inputs.nodes));
    }
    if (trainer.home.value() < 0 || trainer.home.value() >= inputs.lanes_per_node) {
      return absl::InvalidArgumentError(absl::StrCat("trainer ", trainer.rank.value(), " has lane ",
                                                     trainer.home.value(), " of ",
                                                     inputs.lanes_per_node, " as its home"));
    }
  }
  return CheckCosts(inputs.costs);
}

// What may share a batch.
using ClassKey = std::tuple<int64_t, int64_t, int32_t, ElementType>;

class Planner {
 public:
  // Plans for `memory_bytes` per lane (0: no limit), which may be less than the inputs' own: what
  // is received from other nodes is only known when all owners are.
  Planner(const PlanInputs& inputs, int64_t memory_bytes)
      : inputs_(inputs),
        layout_(inputs.layout),
        members_{inputs.nodes, inputs.lanes_per_node},
        model_(inputs.costs),
        memory_bytes_(memory_bytes) {}

  absl::StatusOr<Plan> Run() {
    Buckets buckets = MakeBuckets(layout_, inputs_.bucket_bytes);
    plan_.buckets = buckets.count;
    plan_.parameter_bucket = std::move(buckets.of_parameter);
    if (absl::Status status = MakeMatrices(); !status.ok()) return status;
    budget_.load.assign(members_.lanes(), 0);
    budget_.bytes.assign(members_.lanes(), 0);
    budget_.memory_bytes = memory_bytes_;
    auto cells = AdamWCells(layout_);
    if (!cells.ok()) return cells.status();
    const std::vector<HeldCell> replicated = KeepShards(*std::move(cells));
    if (absl::Status status = AssignMatrices(replicated); !status.ok()) return status;
    SpreadReplicated(layout_, model_, replicated, budget_, pieces_);
    if (absl::Status status = CollectUnits(); !status.ok()) return status;
    if (absl::Status status = FillCells(layout_, plan_); !status.ok()) return status;
    MakeBatches();
    auto memory = LaneMemory(inputs_, plan_);
    if (!memory.ok()) return memory.status();
    plan_.lane_memory_bytes = *std::move(memory);
    Judge();
    plan_.digest = DigestOf(inputs_, plan_);
    return std::move(plan_);
  }

 private:
  absl::Status MakeMatrices() {
    std::map<ClassKey, int32_t> index;
    const auto ranges = FragmentRanges(layout_);
    for (size_t p = 0; p < layout_.parameters.size(); ++p) {
      const Parameter& parameter = layout_.parameters[p];
      if (parameter.route != Route::kMuon) continue;
      const int64_t all = CountMatrices(parameter) + std::ssize(matrices_);
      if (all > kMatricesMax) {
        return TooMany(parameter, "matrices", all, "matrices", kMatricesMax);
      }
      const size_t first = matrices_.size();
      for (Box& box : MatricesOf(parameter)) {
        Unit unit;
        unit.parameter = static_cast<int32_t>(p);
        const size_t dims = box.begin.size();
        unit.rows = box.end[dims - 2] - box.begin[dims - 2];
        unit.cols = box.end[dims - 1] - box.begin[dims - 1];
        unit.bucket = BucketId(plan_.parameter_bucket[p]);
        unit.box = std::move(box);
        index.emplace(KeyOf(unit), 0);
        matrices_.push_back(std::move(unit));
      }
      if (absl::Status status = FindHolders(parameter, first, ranges[p]); !status.ok()) {
        return status;
      }
    }
    // Classes in order of their keys, so that numbers do not depend on who came first.
    for (auto& [key, k] : index) {
      k = static_cast<int32_t>(classes_.size());
      const auto& [rows, cols, group, weight_type] = key;
      classes_.push_back({{rows, cols, IterationOf(group)},
                          0,
                          SlotBytes(UnitKind::kMatrix, rows * cols),
                          StagingBytes(rows * cols, weight_type)});
    }
    for (const Unit& unit : matrices_) {
      class_of_.push_back(index.at(KeyOf(unit)));
      ++classes_[class_of_.back()].count;
    }
    class_index_ = std::move(index);
    return absl::OkStatus();
  }

  // Of the matrices from `first` on, all of the parameter whose fragments are given.
  absl::Status FindHolders(const Parameter& parameter, size_t first,
                           std::pair<int32_t, int32_t> fragments) {
    matrix_holders_.resize(matrices_.size());
    // In the outermost dimension matrices are in order, and equal or apart: those that a fragment
    // reaches into are neighbours.
    const auto from = matrices_.begin() + static_cast<std::ptrdiff_t>(first);
    std::vector<std::pair<size_t, size_t>> near;
    for (int32_t f = fragments.first; f < fragments.second; ++f) {
      const Box& box = layout_.fragments[f].box;
      const auto begin = std::partition_point(from, matrices_.end(), [&](const Unit& matrix) {
        return matrix.box.end[0] <= box.begin[0];
      });
      const auto end = std::partition_point(begin, matrices_.end(), [&](const Unit& matrix) {
        return matrix.box.begin[0] < box.end[0];
      });
      near.emplace_back(begin - matrices_.begin(), end - matrices_.begin());
      holders_ += end - begin;
    }
    if (holders_ > kMatrixHoldersMax) {
      return TooMany(parameter, "holders", holders_, "parts of matrices that trainers hold",
                     kMatrixHoldersMax);
    }
    for (size_t i = 0; i < near.size(); ++i) {
      const int32_t f = fragments.first + static_cast<int32_t>(i);
      for (size_t m = near[i].first; m < near[i].second; ++m) {
        if (Intersects(layout_.fragments[f].box, matrices_[m].box)) matrix_holders_[m].push_back(f);
      }
    }
    return absl::OkStatus();
  }

  [[nodiscard]] ClassKey KeyOf(const Unit& unit) const {
    const Parameter& parameter = layout_.parameters[unit.parameter];
    return {unit.rows, unit.cols, parameter.group, parameter.weight_type};
  }

  [[nodiscard]] Iteration IterationOf(int32_t group) const {
    const auto index = static_cast<size_t>(group);
    return index < inputs_.iterations.size() ? inputs_.iterations[index] : Iteration{};
  }

  // Gives shards to the lanes of their holders; returns the cells that are replicas of whole
  // tensors.
  std::vector<HeldCell> KeepShards(std::vector<HeldCell> cells) {
    std::vector<HeldCell> replicated;
    for (HeldCell& cell : cells) {
      const Parameter& parameter = layout_.parameters[cell.parameter];
      if (cell.fragments.size() > 1 && cell.box == WholeBox(parameter.shape)) {
        replicated.push_back(std::move(cell));
        continue;
      }
      std::set<LaneId> homes;
      for (int32_t f : cell.fragments) {
        homes.insert(members_.HomeOf(layout_.trainers[layout_.fragments[f].rank.value()]));
      }
      // A shard with replicas (HSDP): each of the holders' lanes takes an equal part.
      std::vector<Box> parts = {cell.box};
      if (homes.size() > 1 && Elements(cell.box) > kPieceWholeMax) {
        parts = CutByShares(parameter.shape, cell.box, std::vector<int64_t>(homes.size(), 1));
      }
      auto home = homes.begin();
      if (parts.size() == 1) home = LeastLoaded(homes);
      for (const Box& part : parts) {
        if (!Empty(part)) Keep(cell.parameter, part, *home);
        ++home;
      }
    }
    return replicated;
  }

  [[nodiscard]] std::set<LaneId>::const_iterator LeastLoaded(const std::set<LaneId>& homes) const {
    return std::min_element(homes.begin(), homes.end(), [&](LaneId a, LaneId b) {
      return budget_.load[a.value()] < budget_.load[b.value()];
    });
  }

  void Keep(int32_t parameter, const Box& part, LaneId owner) {
    const ElementType type = layout_.parameters[parameter].weight_type;
    for (Box& box : CutBox(layout_.parameters[parameter].shape, part, kPieceElementsMax)) {
      const int64_t elements = Elements(box);
      budget_.load[owner.value()] += PieceCost(model_, elements);
      budget_.bytes[owner.value()] += PieceBytes(elements, type);
      pieces_.push_back(MakePiece(layout_, parameter, std::move(box), owner));
    }
  }

  absl::Status AssignMatrices(const std::vector<HeldCell>& replicated) {
    AssignmentProblem problem;
    problem.model = &model_;
    problem.classes = classes_;
    problem.base_load = budget_.load;
    problem.base_bytes = budget_.bytes;
    problem.memory_bytes = memory_bytes_;
    problem.batch_slack = members_.nodes == 1 ? kSlackOfOneNode : kSlackOfSeveral;
    int64_t divisible_bytes = 0;
    for (const HeldCell& cell : replicated) {
      // Rounded down here and up where pieces are cut, so that the bound stays one.
      problem.divisible += std::max<Nanoseconds>(0, PieceCost(model_, Elements(cell.box)) - 1);
      const ElementType type = layout_.parameters[cell.parameter].weight_type;
      divisible_bytes += PieceBytes(Elements(cell.box), type);
    }
    // Each lane keeps room for its share of the pieces, unless matrices need all that there is.
    const int64_t share = divisible_bytes / members_.lanes();
    if (memory_bytes_ > share) problem.memory_bytes = memory_bytes_ - share;
    auto assignment = Assign(problem);
    if (absl::IsResourceExhausted(assignment.status()) && problem.memory_bytes != memory_bytes_) {
      problem.memory_bytes = memory_bytes_;
      assignment = Assign(problem);
    }
    if (!assignment.ok()) return assignment.status();
    lower_bound_ = assignment->lower_bound;
    costs_ = std::move(assignment->costs);
    budget_.load = std::move(assignment->load);
    budget_.bytes = std::move(assignment->bytes);
    Place(layout_, members_, matrix_holders_, class_of_, std::move(assignment->counts), matrices_);
    return absl::OkStatus();
  }

  absl::Status CollectUnits() {
    for (Unit& piece : pieces_) {
      piece.bucket = BucketId(plan_.parameter_bucket[piece.parameter]);
    }
    plan_.units = std::exchange(matrices_, {});
    plan_.units.reserve(plan_.units.size() + pieces_.size());
    std::move(pieces_.begin(), pieces_.end(), std::back_inserter(plan_.units));
    pieces_ = {};
    matrix_holders_ = {};
    if (static_cast<int64_t>(plan_.units.size()) > kUnitsMax) {
      return Error(
          absl::StatusCode::kInvalidArgument, "LAYOUT_INVALID",
          Say("the job has ", Named("units", plan_.units.size()), " matrices and pieces; at most ",
              Named("at_most", kUnitsMax), " are allowed"));
    }
    std::sort(plan_.units.begin(), plan_.units.end(), [](const Unit& a, const Unit& b) {
      return a.parameter != b.parameter ? a.parameter < b.parameter : Before(a.box, b.box);
    });
    for (size_t u = 0; u < plan_.units.size(); ++u) {
      plan_.units[u].id = UnitId(static_cast<int32_t>(u));
    }
    return absl::OkStatus();
  }

  void MakeBatches() {
    const auto split = [&](const Unit& unit, int32_t matrices) {
      return costs_[class_index_.at(KeyOf(unit))].Split(matrices);
    };
    for (const std::vector<UnitId>& lane_units : UnitsByLane(plan_.units, members_.lanes())) {
      AssignBatches(layout_, members_.nodes == 1 ? BatchOrder::kWeights : BatchOrder::kBuckets,
                    split, lane_units, plan_.units);
    }
  }

  void Judge() {
    Nanoseconds total = 0;
    Nanoseconds slowest = 0;
    for (Nanoseconds load : budget_.load) {
      plan_.lane_load_us.push_back(ToMicroseconds(load));
      total += load;
      slowest = std::max(slowest, load);
    }
    PlanQuality& quality = plan_.quality;
    quality.makespan_us = ToMicroseconds(slowest);
    quality.lower_bound_us = ToMicroseconds(lower_bound_);
    quality.optimal = slowest <= lower_bound_;
    if (lower_bound_ > 0) {
      quality.gap = quality.optimal ? 0 : quality.makespan_us / quality.lower_bound_us - 1;
    }
    if (total > 0) {
      quality.imbalance =
          static_cast<double>(slowest) * members_.lanes() / static_cast<double>(total);
    }
  }

  const PlanInputs& inputs_;
  const Layout& layout_;
  const Members members_;
  const CostModel model_;
  const int64_t memory_bytes_;

  Plan plan_;
  std::vector<Unit> matrices_;
  std::vector<std::vector<int32_t>> matrix_holders_;  // as matrices_
  int64_t holders_ = 0;                               // of all of them, about
  std::vector<int32_t> class_of_;                     // as matrices_
  std::map<ClassKey, int32_t> class_index_;
  std::vector<MatrixClass> classes_;
  std::vector<BatchCost> costs_;  // as classes_
  std::vector<Unit> pieces_;
  LaneBudget budget_;
  Nanoseconds lower_bound_ = 0;
};

}  // namespace

absl::StatusOr<Plan> MakePlan(const PlanInputs& inputs) {
  if (absl::Status status = CheckInputs(inputs); !status.ok()) return status;
  const int64_t limit = inputs.lane_memory_bytes;
  if (limit == 0) return Planner(inputs, 0).Run();
  // Owners and batches are chosen by what owners must hold themselves; pieces, and what passes
  // through lanes' memory on the way between nodes, follow from that choice. Where all is too much,
  // less is left for the choice: at least a hundredth, or it would be the same one again.
  constexpr int kTries = 12;
  int64_t available = limit;
  int64_t least = 0;  // of what plans have needed
  absl::Status refusal;
  for (int attempt = 0; attempt < kTries && available > 0; ++attempt) {
    auto plan = Planner(inputs, available).Run();
    if (!plan.ok()) {
      if (!absl::IsResourceExhausted(plan.status())) return plan.status();
      refusal.Update(plan.status());
      available -= available / 100;
      continue;
    }
    const auto fullest =
        std::max_element(plan->lane_memory_bytes.begin(), plan->lane_memory_bytes.end());
    if (*fullest <= limit) return plan;
    if (least == 0 || *fullest < least) {
      least = *fullest;
      refusal = Error(absl::StatusCode::kResourceExhausted, "MEMORY_EXHAUSTED",
                      Say("lane ", Named("lane", fullest - plan->lane_memory_bytes.begin()),
                          " would need ", Named("wanted_bytes", *fullest),
                          " bytes of its memory limit of ", Named("limit_bytes", limit)));
    }
    available -= std::max(*fullest - limit, available / 100);
  }
  return refusal;
}

}  // namespace dmuond::scheduler
