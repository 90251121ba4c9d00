// Random worlds: every kind of sharding and replication, and what must hold of each plan.
#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "scheduler/lane_memory.h"
#include "scheduler/lane_program.h"
#include "scheduler/matrix_view.h"
#include "scheduler/plan.h"
#include "scheduler/state_slots.h"
#include "tests/sanitized.h"
#include "tests/scheduler/layouts.h"
#include "tests/scheduler/property.h"

namespace dmuond::scheduler {
namespace {

using testing::ForAll;
using testing::Pick;
using testing::World;

Parameter RandomParameter(int64_t number) {
  Parameter parameter;
  parameter.name = "p" + std::to_string(number);
  parameter.route = Pick(0, 1) == 0 ? Route::kMuon : Route::kAdamW;
  const bool muon = parameter.route == Route::kMuon;
  parameter.shape.resize(Pick(muon ? 2 : 0, 3));
  for (int64_t& extent : parameter.shape) extent = Pick(1, 6);
  if (muon && Pick(0, 2) == 0) {
    const int64_t rows = parameter.shape[parameter.shape.size() - 2];
    parameter.view.kind = MatrixView::Kind::kRowBlocks;
    const int64_t first = Pick(1, rows);
    parameter.view.row_blocks = {first};
    if (first < rows) parameter.view.row_blocks.push_back(rows - first);
  }
  if (!muon && Pick(0, 5) == 0) parameter.shape = {Pick(1, 9) * 1000, 64 * Pick(1, 4)};
  parameter.weight_type = Pick(0, 1) == 0 ? ElementType::kF32 : ElementType::kBF16;
  parameter.group = static_cast<int32_t>(Pick(0, 1));
  parameter.ready_order = static_cast<int32_t>(Pick(0, 3));
  return parameter;
}

// Cuts the tensor into a grid at random places (empty cells included) and gives each cell to a
// random set of trainers, none of which gets two that overlap.
void HoldRandomly(World& world, const Parameter& parameter) {
  const Contribution contribution = Pick(0, 3) == 0 ? Contribution::kSame : Contribution::kSum;
  std::vector<Box> cells = {WholeBox(parameter.shape)};
  for (size_t d = 0; d < parameter.shape.size(); ++d) {
    const int64_t cuts = Pick(0, 2);
    for (int64_t c = 0; c < cuts; ++c) {
      const int64_t at = Pick(0, parameter.shape[d]);
      std::vector<Box> next;
      for (const Box& cell : cells) {
        Box low = cell;
        Box high = cell;
        low.end[d] = std::clamp(at, cell.begin[d], cell.end[d]);
        high.begin[d] = low.end[d];
        next.push_back(low);
        next.push_back(high);
      }
      cells = std::move(next);
    }
  }
  std::set<int32_t> holders;
  for (const Box& cell : cells) {
    const int64_t copies = Pick(1, world.trainers());
    std::set<int32_t> ranks;
    for (int64_t i = 0; i < copies; ++i) {
      ranks.insert(static_cast<int32_t>(Pick(0, world.trainers() - 1)));
    }
    // Of a sum's holders some give nothing, as long as one gives something.
    const auto giver = static_cast<int64_t>(Pick(0, static_cast<int64_t>(ranks.size()) - 1));
    const bool some_give_none = contribution == Contribution::kSum && Pick(0, 2) == 0;
    int64_t holder = 0;
    for (int32_t rank : ranks) {
      const bool none = some_give_none && holder++ != giver && Pick(0, 1) == 0;
      if (Empty(cell) && holders.count(rank) > 0) continue;
      world.Hold(rank, parameter, cell, none ? Contribution::kNone : contribution);
      holders.insert(rank);
    }
  }
  // A trainer with nothing else holds a box across the grid.
  for (int32_t rank = 0; rank < world.trainers(); ++rank) {
    if (holders.count(rank) > 0 || Pick(0, 2) != 0) continue;
    Box box = WholeBox(parameter.shape);
    for (size_t d = 0; d < parameter.shape.size(); ++d) {
      box.begin[d] = Pick(0, parameter.shape[d]);
      box.end[d] = Pick(box.begin[d], parameter.shape[d]);
    }
    world.Hold(rank, parameter, box, contribution);
  }
}

World RandomWorld() {
  const auto nodes = static_cast<int32_t>(Pick(1, 3));
  const auto lanes = static_cast<int32_t>(Pick(1, 3));
  World world(static_cast<int32_t>(Pick(1, 7)), nodes, lanes);
  for (Registration& registration : world.registrations) {
    registration.node = NodeRank(static_cast<int32_t>(Pick(0, nodes - 1)));
    registration.home = LaneIndex(static_cast<int32_t>(Pick(0, lanes - 1)));
  }
  const int64_t parameters = Pick(1, 4);
  for (int64_t p = 0; p < parameters; ++p) HoldRandomly(world, RandomParameter(p));
  return world;
}

PlanInputs MustInputs(const World& world) {
  auto inputs = world.Inputs();
  RC_ASSERT(inputs.ok());
  inputs->bucket_bytes = Pick(0, 400);
  return *std::move(inputs);
}

Plan MustPlan(const PlanInputs& inputs) {
  auto plan = MakePlan(inputs);
  RC_ASSERT(plan.ok());
  return *std::move(plan);
}

std::vector<LaneProgram> MustPrograms(const PlanInputs& inputs, const Plan& plan) {
  std::vector<LaneProgram> programs;
  for (int32_t lane = 0; lane < inputs.nodes * inputs.lanes_per_node; ++lane) {
    auto program = MakeLaneProgram(inputs, plan, LaneId(lane));
    RC_ASSERT(program.ok());
    programs.push_back(*std::move(program));
  }
  return programs;
}

Box RandomPoint(const Box& box) {
  Box point = box;
  for (size_t d = 0; d < box.begin.size(); ++d) {
    point.begin[d] = Pick(box.begin[d], box.end[d] - 1);
    point.end[d] = point.begin[d] + 1;
  }
  return point;
}

// All elements of small tensors, some of large ones.
std::vector<Box> Points(const Box& box) {
  std::vector<Box> points;
  if (Elements(box) > 300) {
    for (int i = 0; i < 10; ++i) points.push_back(RandomPoint(box));
    return points;
  }
  for (int64_t flat = 0; flat < Elements(box); ++flat) {
    Box point = box;
    int64_t rest = flat;
    for (size_t d = box.begin.size(); d-- > 0;) {
      const int64_t extent = box.end[d] - box.begin[d];
      point.begin[d] = box.begin[d] + rest % extent;
      point.end[d] = point.begin[d] + 1;
      rest /= extent;
    }
    points.push_back(point);
  }
  return points;
}

// The one cell of the list that has the point.
const Cell& CellAt(const std::vector<Cell>& cells, const Box& point) {
  const Cell* found = nullptr;
  for (const Cell& cell : cells) {
    if (!Contains(cell.box, point)) continue;
    RC_ASSERT(found == nullptr);
    found = &cell;
  }
  RC_ASSERT(found != nullptr);
  return *found;
}

TEST(PlanPropertyTest, EveryElementHasOneUnitAndIsContributedExactlyByItsHolders) {
  ForAll(6000, [] {
    const PlanInputs inputs = MustInputs(RandomWorld());
    const Plan plan = MustPlan(inputs);
    const Layout& layout = inputs.layout;
    for (size_t p = 0; p < layout.parameters.size(); ++p) {
      for (const Box& point : Points(WholeBox(layout.parameters[p].shape))) {
        std::vector<int32_t> holders;
        for (size_t f = 0; f < layout.fragments.size(); ++f) {
          if (layout.fragments[f].parameter == p && Contains(layout.fragments[f].box, point)) {
            holders.push_back(static_cast<int32_t>(f));
          }
        }
        int units = 0;
        for (const Unit& unit : plan.units) {
          if (unit.parameter != p || !Contains(unit.box, point)) continue;
          ++units;
          const auto u = static_cast<size_t>(unit.id.value());
          RC_ASSERT(CellAt(plan.cells[u], point).lowest == holders[0]);
          std::vector<int32_t> contributors = holders;
          if (layout.fragments[holders[0]].contribution == Contribution::kSame) {
            contributors.resize(1);
          }
          std::erase_if(contributors, [&](int32_t f) {
            return layout.fragments[f].contribution == Contribution::kNone;
          });
          const Indices& given = CellAt(plan.cells[u], point).fragments;
          RC_ASSERT(std::vector<int32_t>(given.begin(), given.end()) == contributors);
          for (int32_t f : holders) {
            RC_ASSERT(std::count(plan.holders[u].begin(), plan.holders[u].end(), f) == 1);
          }
        }
        RC_ASSERT(units == 1);
      }
    }
  });
}

// (bucket, unit, cell, first leaf or box) of all messages from one lane to another.
std::vector<std::string> Messages(const std::vector<std::vector<Transfer>>& transfers, LaneId from,
                                  LaneId to) {
  std::vector<std::string> messages;
  for (size_t bucket = 0; bucket < transfers.size(); ++bucket) {
    for (const Transfer& t : transfers[bucket]) {
      if (t.from != from || t.to != to) continue;
      messages.push_back(std::to_string(bucket) + " " + std::to_string(t.unit.value()) + " " +
                         std::to_string(t.cell) + " " + std::to_string(t.subtree.first) + " " +
                         std::to_string(t.subtree.level) + ToString(t.box) + " " +
                         std::to_string(t.bytes));
    }
  }
  return messages;
}

TEST(PlanPropertyTest, EverySendHasItsReceiveInTheSameOrder) {
  ForAll(3000, [] {
    const PlanInputs inputs = MustInputs(RandomWorld());
    const Plan plan = MustPlan(inputs);
    const std::vector<LaneProgram> programs = MustPrograms(inputs, plan);
    for (const LaneProgram& from : programs) {
      for (const LaneProgram& to : programs) {
        for (auto list : {&LaneProgram::partials, &LaneProgram::weights, &LaneProgram::adopts}) {
          const auto sent = Messages(from.*list, from.lane, to.lane);
          RC_ASSERT(sent == Messages(to.*list, from.lane, to.lane));
          RC_ASSERT(sent.empty() || from.rail == to.rail);
          RC_ASSERT(sent.empty() || from.node != to.node);
        }
      }
    }
  });
}

TEST(PlanPropertyTest, ALaneTakesEveryProgramThatIsMadeForIt) {
  ForAll(3000, [] {
    const PlanInputs inputs = MustInputs(RandomWorld());
    for (const LaneProgram& program : MustPrograms(inputs, MustPlan(inputs))) {
      const absl::Status sound = CheckLaneProgram(program);
      RC_ASSERT(sound.ToString() == "OK");
    }
  });
}

TEST(PlanPropertyTest, OwnersGetEveryLeafAndHoldersEveryWeight) {
  ForAll(3000, [] {
    const PlanInputs inputs = MustInputs(RandomWorld());
    const Plan plan = MustPlan(inputs);
    const Layout& layout = inputs.layout;
    const std::vector<LaneProgram> programs = MustPrograms(inputs, plan);
    for (const Unit& unit : plan.units) {
      const LaneProgram& owner = programs[unit.owner.value()];
      const auto u = static_cast<size_t>(unit.id.value());
      const auto bucket = static_cast<size_t>(unit.bucket.value());
      for (size_t c = 0; c < plan.cells[u].size(); ++c) {
        // Leaves that are here, and leaves that arrive in sums: each once.
        const Indices& fragments = plan.cells[u][c].fragments;
        std::vector<int> seen(fragments.size(), 0);
        for (size_t i = 0; i < fragments.size(); ++i) {
          const TrainerRank rank = layout.fragments[fragments[i]].rank;
          seen[i] += layout.trainers[rank.value()].node == owner.node ? 1 : 0;
        }
        for (const Transfer& t : owner.partials[bucket]) {
          const bool of_cell = t.unit == unit.id && t.cell == static_cast<int32_t>(c);
          if (!of_cell || t.to != owner.lane) continue;
          RC_ASSERT(t.box == plan.cells[u][c].box);
          for (int32_t i = 0; i < t.subtree.leaves; ++i) ++seen[t.subtree.first + i];
        }
        RC_ASSERT(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }));
      }
      for (int32_t f : plan.holders[u]) {
        const NodeRank node = layout.trainers[layout.fragments[f].rank.value()].node;
        const LaneProgram& local =
            programs[node.value() * inputs.lanes_per_node + owner.rail.value()];
        const LaneUnit* publish = local.Find(unit.id);
        RC_ASSERT(publish != nullptr);
        RC_ASSERT(std::count_if(publish->holders.begin(), publish->holders.end(), [&](int32_t i) {
                    return local.fragments[i].rank == layout.fragments[f].rank &&
                           local.fragments[i].box == layout.fragments[f].box;
                  }) == 1);
        if (node == owner.node) continue;
        for (const Box& point : Points(Intersect(layout.fragments[f].box, unit.box))) {
          int arrives = 0;
          for (const Transfer& t : local.weights[bucket]) {
            arrives += t.unit == unit.id && t.to == local.lane && Contains(t.box, point) ? 1 : 0;
          }
          RC_ASSERT(arrives == 1);
        }
      }
      for (const Cell& cell : plan.cells[u]) {
        const TrainerRank lowest = layout.fragments[cell.lowest].rank;
        int arrives = layout.trainers[lowest.value()].node == owner.node ? 1 : 0;
        for (const Transfer& t : owner.adopts[bucket]) {
          arrives += t.unit == unit.id && t.to == owner.lane && t.box == cell.box ? 1 : 0;
        }
        RC_ASSERT(arrives == 1);
      }
    }
  });
}

struct Region {
  int64_t begin;
  int64_t end;
};

void AssertDisjoint(std::vector<Region> regions, int64_t limit) {
  std::sort(regions.begin(), regions.end(),
            [](const Region& a, const Region& b) { return a.begin < b.begin; });
  for (size_t i = 0; i < regions.size(); ++i) {
    RC_ASSERT(regions[i].begin % kAlignment == 0);
    RC_ASSERT(regions[i].end <= limit);
    if (i > 0) RC_ASSERT(regions[i - 1].end <= regions[i].begin);
  }
}

// Returns the part of staging memory where gradients land. It has room for those of all trainers of
// the node but the lane's own, or is as large as it may be.
Region Landing(const PlanInputs& inputs, const LaneProgram& program) {
  int64_t bytes = 0;
  for (const LaneUnit& of : program.units) {
    const Parameter& parameter = inputs.layout.parameters[of.unit.parameter];
    for (const LaneCell& cell : of.cells) {
      for (const CellLeaf& leaf : cell.leaves) {
        if (leaf.node != program.node) continue;
        if (inputs.layout.trainers[leaf.rank.value()].home == program.rail) continue;
        bytes += AlignUp(Elements(cell.box) * SizeOf(parameter.gradient_type));
      }
    }
  }
  RC_ASSERT(program.landing_bytes == std::min(bytes, inputs.landing_bytes_max));
  return {program.staging_bytes - program.landing_bytes, program.staging_bytes};
}

// None, less than what lands as a rule, room for all.
int64_t SomeLandingBytes() {
  return std::array<int64_t, 3>{0, kAlignment * Pick(1, 16),
                                std::numeric_limits<int64_t>::max()}[Pick(0, 2)];
}

TEST(PlanPropertyTest, MemoryOfALaneIsDisjointAlignedAndWithinItsSums) {
  ForAll(3000, [] {
    PlanInputs inputs = MustInputs(RandomWorld());
    inputs.landing_bytes_max = SomeLandingBytes();
    const Plan plan = MustPlan(inputs);
    for (const LaneProgram& program : MustPrograms(inputs, plan)) {
      std::vector<Region> step = {Landing(inputs, program)};
      for (const StagedUnit& staged : program.staged) {
        const Unit& unit = plan.units[staged.unit.value()];
        const int64_t elements = unit.rows * unit.cols;
        const int64_t size = SizeOf(inputs.layout.parameters[unit.parameter].weight_type);
        step.push_back({staged.gradient_offset_bytes, staged.gradient_offset_bytes + elements * 4});
        step.push_back({staged.weight_offset_bytes, staged.weight_offset_bytes + elements * size});
      }
      std::vector<Region> adopt = step;
      for (const auto& bucket : program.adopts) {
        for (const Transfer& t : bucket) {
          adopt.push_back({t.offset_bytes, t.offset_bytes + t.bytes});
        }
      }
      for (const auto& list : {program.partials, program.weights}) {
        for (const auto& bucket : list) {
          for (const Transfer& t : bucket) {
            if (!t.in_place) step.push_back({t.offset_bytes, t.offset_bytes + t.bytes});
          }
        }
      }
      AssertDisjoint(step, program.staging_bytes);
      AssertDisjoint(adopt, program.staging_bytes);
      std::vector<Region> slots;
      std::map<UnitId, size_t> class_of;
      for (const SlotClass& c : program.slot_classes) {
        RC_ASSERT(c.tensor_bytes >= c.elements * 4);
        RC_ASSERT(c.slot_bytes == c.tensors * c.tensor_bytes);
        slots.push_back({c.offset_bytes, c.offset_bytes + c.slots * c.slot_bytes});
        for (UnitId id : c.units) {
          const Unit& unit = plan.units[id.value()];
          RC_ASSERT(unit.rows * unit.cols <= c.elements);
          RC_ASSERT(class_of.emplace(id, slots.size() - 1).second);
        }
      }
      AssertDisjoint(slots, program.state_bytes);
      // Free slots for the largest batch; every owned unit in one batch.
      std::set<UnitId> batched;
      for (const Batch& batch : program.batches) {
        RC_ASSERT(!batch.units.empty());
        std::map<size_t, int32_t> wanted;
        for (UnitId id : batch.units) {
          RC_ASSERT(batched.insert(id).second);
          const SlotClass& c = program.slot_classes[class_of.at(id)];
          RC_ASSERT(++wanted[class_of.at(id)] <= c.slots - static_cast<int32_t>(c.units.size()));
        }
      }
      RC_ASSERT(batched.size() == program.staged.size());
      RC_ASSERT(class_of.size() == program.staged.size());
      RC_ASSERT(program.state_bytes + program.staging_bytes <=
                plan.lane_memory_bytes[program.lane.value()]);
    }
  });
}

TEST(PlanPropertyTest, ArrivalOrderDoesNotChangeAnything) {
  ForAll(3000, [] {
    World world = RandomWorld();
    const PlanInputs inputs = MustInputs(world);
    const Plan plan = MustPlan(inputs);
    for (size_t i = world.registrations.size(); i > 1; --i) {
      std::swap(world.registrations[i - 1],
                world.registrations[Pick(0, static_cast<int64_t>(i) - 1)]);
    }
    for (Registration& registration : world.registrations) {
      std::reverse(registration.fragments.begin(), registration.fragments.end());
    }
    PlanInputs shuffled = *world.Inputs();
    shuffled.bucket_bytes = inputs.bucket_bytes;
    RC_ASSERT(MustPlan(shuffled).digest == plan.digest);
    RC_ASSERT(MustPlan(inputs).digest == plan.digest);
    shuffled.layout.parameters[0].reduce_factor *= 2;
    RC_ASSERT(MustPlan(shuffled).digest != plan.digest);
  });
}

TEST(PlanPropertyTest, MemoryIsEstimatedInGranules) {
  ForAll(1000, [] {
    PlanInputs inputs = MustInputs(RandomWorld());
    const Plan in_bytes = MustPlan(inputs);
    const int64_t granule = Pick(2, 1 << 16);
    inputs.memory_granule_bytes = granule;
    inputs.landing_bytes_max = SomeLandingBytes();
    const Plan plan = MustPlan(inputs);
    const auto taken = [&](int64_t bytes) {
      return (std::max<int64_t>(bytes, 1) + granule - 1) / granule * granule;
    };
    for (const LaneProgram& program : MustPrograms(inputs, plan)) {
      const int32_t lane = program.lane.value();
      // What the daemon makes: two allocations, each of whole granules. And the lane's own scratch.
      int64_t workspace = 0;
      for (const Batch& batch : program.batches) {
        if (batch.kind != UnitKind::kMatrix) continue;
        workspace = std::max(workspace, WorkspaceBytes(batch.rows, batch.cols,
                                                       static_cast<int32_t>(batch.units.size())));
      }
      RC_ASSERT(taken(program.state_bytes) + taken(program.staging_bytes) + workspace ==
                plan.lane_memory_bytes[lane]);
      RC_ASSERT(plan.lane_memory_bytes[lane] >= in_bytes.lane_memory_bytes[lane]);
    }
  });
}

TEST(PlanPropertyTest, MemoryLimitIsKeptOrRefusedWithBothValues) {
  int planned = 0;
  int refused = 0;
  ForAll(3000, [&] {
    PlanInputs inputs = MustInputs(RandomWorld());
    const Plan unlimited = MustPlan(inputs);
    const int64_t most =
        *std::max_element(unlimited.lane_memory_bytes.begin(), unlimited.lane_memory_bytes.end());
    inputs.lane_memory_bytes = std::max<int64_t>(1, most * Pick(40, 120) / 100);
    const auto plan = MakePlan(inputs);
    if (!plan.ok()) {
      ++refused;
      RC_ASSERT(plan.status().code() == absl::StatusCode::kResourceExhausted);
      RC_ASSERT(plan.status().message().find("bytes") != absl::string_view::npos);
      return;
    }
    ++planned;
    for (int64_t bytes : plan->lane_memory_bytes) RC_ASSERT(bytes <= inputs.lane_memory_bytes);
  });
  EXPECT_GT(planned, 100 / dmuond::testing::kSlowdown);
  EXPECT_GT(refused, 100 / dmuond::testing::kSlowdown);
}

TEST(PlanPropertyTest, QualityIsWhatTheOwnersAmountTo) {
  ForAll(3000, [] {
    const PlanInputs inputs = MustInputs(RandomWorld());
    const Plan plan = MustPlan(inputs);
    const CostModel model(inputs.costs);
    double slowest = 0;
    for (const LaneProgram& program : MustPrograms(inputs, plan)) {
      double load = 0;
      for (const Batch& batch : program.batches) {
        if (batch.kind == UnitKind::kMatrix) {
          load +=
              model.MatrixBatch({batch.rows, batch.cols}, static_cast<int32_t>(batch.units.size()));
        } else {
          for (UnitId id : batch.units) load += model.Piece(plan.units[id.value()].cols);
        }
      }
      slowest = std::max(slowest, load);
      RC_ASSERT(std::abs(load - plan.lane_load_us[program.lane.value()]) < 0.1);
    }
    RC_ASSERT(std::abs(slowest - plan.quality.makespan_us) < 0.1);
    RC_ASSERT(plan.quality.lower_bound_us <= plan.quality.makespan_us);
  });
}

}  // namespace
}  // namespace dmuond::scheduler
