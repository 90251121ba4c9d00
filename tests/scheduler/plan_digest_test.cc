// What has been planned is planned again: a job that goes on from a snapshot, and daemons of
// different builds in one group, rely on the same inputs giving the same plan for ever.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "scheduler/digest.h"
#include "scheduler/lane_program.h"
#include "scheduler/model_layout.h"
#include "scheduler/plan.h"
#include "tests/scheduler/chance.h"
#include "tests/scheduler/layouts.h"

namespace dmuond::scheduler {
namespace {

using testing::AdamW;
using testing::Chance;
using ::testing::ElementsAreArray;
using testing::Muon;
using testing::World;

void AddTransfers(const std::vector<std::vector<Transfer>>& transfers, Digest& digest) {
  for (const std::vector<Transfer>& bucket : transfers) {
    digest.Add(bucket.size());
    for (const Transfer& t : bucket) {
      for (int32_t id : {t.unit.value(), t.from.value(), t.to.value(), t.cell}) digest.Add(id);
      digest.Add(t.box);
      digest.Add(t.subtree.first);
      digest.Add(t.subtree.leaves);
      digest.Add(static_cast<uint8_t>(t.type));
      digest.Add(t.bytes);
      digest.Add(t.offset_bytes);
      digest.Add(t.in_place);
    }
  }
}

// Per bucket, the units of which `wanted` holds.
template <typename Wanted>
void AddUnits(const LaneProgram& program, const Wanted& wanted, Digest& digest) {
  std::vector<std::vector<int32_t>> buckets(program.buckets());
  for (const LaneUnit& of : program.units) {
    if (wanted(of)) buckets[of.unit.bucket.value()].push_back(of.unit.id.value());
  }
  for (const std::vector<int32_t>& units : buckets) {
    digest.Add(units.size());
    for (const int32_t unit : units) digest.Add(unit);
  }
}

void AddProgram(const LaneProgram& program, Digest& digest) {
  AddUnits(
      program,
      [](const LaneUnit& of) {
        return std::any_of(of.cells.begin(), of.cells.end(),
                           [](const LaneCell& cell) { return !cell.leaves.empty(); });
      },
      digest);
  AddUnits(
      program, [](const LaneUnit& of) { return !of.holders.empty(); }, digest);
  AddTransfers(program.partials, digest);
  AddTransfers(program.weights, digest);
  AddTransfers(program.adopts, digest);
  for (const Batch& batch : program.batches) {
    digest.Add(static_cast<uint8_t>(batch.kind));
    digest.Add(batch.rows);
    digest.Add(batch.cols);
    digest.Add(batch.group);
    for (UnitId unit : batch.units) digest.Add(unit.value());
  }
  for (const SlotClass& slots : program.slot_classes) {
    digest.Add(slots.elements);
    digest.Add(slots.offset_bytes);
    digest.Add(slots.slots);
    for (UnitId unit : slots.units) digest.Add(unit.value());
  }
  for (const StagedUnit& staged : program.staged) {
    digest.Add(staged.unit.value());
    digest.Add(staged.gradient_offset_bytes);
    digest.Add(staged.weight_offset_bytes);
  }
  digest.Add(program.state_bytes);
  digest.Add(program.staging_bytes);
}

// Of all that a plan says beyond its own digest: cells, holders, quality, every lane's program.
uint64_t DigestOfAll(const PlanInputs& inputs, const Plan& plan) {
  Digest digest;
  for (size_t u = 0; u < plan.units.size(); ++u) {
    digest.Add(plan.cells[u].size());
    for (const Cell& cell : plan.cells[u]) {
      digest.Add(cell.box);
      digest.Add(cell.fragments.size());
      for (int32_t f : cell.fragments) digest.Add(f);
    }
    // First weights: of each box one trainer's.
    for (const Cell& cell : plan.cells[u]) {
      digest.Add(cell.box);
      digest.Add(size_t{1});
      digest.Add(cell.lowest);
    }
    for (int32_t f : plan.holders[u]) digest.Add(f);
  }
  for (double load : plan.lane_load_us) digest.Add(load);
  for (int64_t bytes : plan.lane_memory_bytes) digest.Add(bytes);
  digest.Add(plan.quality.lower_bound_us);
  for (int32_t lane = 0; lane < inputs.nodes * inputs.lanes_per_node; ++lane) {
    const auto program = MakeLaneProgram(inputs, plan, LaneId(lane));
    EXPECT_TRUE(program.ok()) << program.status();
    if (!program.ok()) continue;
    EXPECT_EQ(CheckLaneProgram(*program), absl::OkStatus());
    AddProgram(*program, digest);
  }
  return digest.value();
}

// "digest of the plan, digest of everything".
std::string Planned(const absl::StatusOr<PlanInputs>& inputs) {
  if (!inputs.ok()) return absl::StatusCodeToString(inputs.status().code());
  const auto plan = MakePlan(*inputs);
  if (!plan.ok()) return absl::StatusCodeToString(plan.status().code());
  return absl::StrCat(absl::Hex(plan->digest, absl::kZeroPad16), " ",
                      absl::Hex(DigestOfAll(*inputs, *plan), absl::kZeroPad16));
}

// A grid of random cuts through the tensor; each cell to some trainers.
void HoldGrid(World& world, const Parameter& parameter, Chance& chance) {
  std::vector<Box> cells = {WholeBox(parameter.shape)};
  for (size_t d = 0; d < parameter.shape.size(); ++d) {
    for (int64_t cuts = chance.Pick(0, 2); cuts > 0; --cuts) {
      const int64_t at = chance.Pick(0, parameter.shape[d]);
      std::vector<Box> next;
      for (const Box& cell : cells) {
        Box low = cell;
        Box high = cell;
        low.end[d] = std::clamp(at, cell.begin[d], cell.end[d]);
        high.begin[d] = low.end[d];
        for (const Box& part : {low, high}) {
          if (!Empty(part)) next.push_back(part);
        }
      }
      cells = std::move(next);
    }
  }
  const Contribution contribution = chance.Of(25) ? Contribution::kSame : Contribution::kSum;
  for (const Box& cell : cells) {
    const int64_t always = chance.Pick(0, world.trainers() - 1);
    for (int32_t rank = 0; rank < world.trainers(); ++rank) {
      if (rank == always || chance.Of(40)) world.Hold(rank, parameter, cell, contribution);
    }
  }
}

Parameter AnyParameter(int64_t number, Chance& chance) {
  const int64_t dims = chance.Pick(1, 3);
  Extents shape(dims);
  for (int64_t& extent : shape) extent = chance.Pick(1, chance.Of(20) ? 700 : 40);
  const std::string name = absl::StrCat("p", number);
  Parameter parameter = dims > 1 && chance.Of(60) ? Muon(name, shape) : AdamW(name, shape);
  if (chance.Of(50)) parameter.weight_type = ElementType::kBF16;
  parameter.group = static_cast<int32_t>(chance.Pick(0, 1));
  parameter.ready_order = static_cast<int32_t>(chance.Pick(0, 3));
  return parameter;
}

std::string RandomPlanned(uint64_t seed) {
  Chance chance(seed);
  const auto nodes = static_cast<int32_t>(chance.Pick(1, 4));
  const auto lanes = static_cast<int32_t>(chance.Pick(1, 4));
  World world(static_cast<int32_t>(chance.Pick(1, 12)), nodes, lanes);
  const int64_t parameters = chance.Pick(1, 12);
  for (int64_t p = 0; p < parameters; ++p) {
    const Parameter parameter = AnyParameter(p, chance);
    if (chance.Of(30)) {
      world.ShardRows(parameter);
    } else if (chance.Of(30)) {
      world.Replicate(parameter);
    } else {
      HoldGrid(world, parameter, chance);
    }
  }
  auto inputs = world.Inputs();
  if (inputs.ok()) inputs->bucket_bytes = chance.Pick(0, 4000);
  // Little memory makes the search for an assignment take its other paths.
  if (inputs.ok() && chance.Of(30)) {
    inputs->lane_memory_bytes = chance.Pick(1, 40) * (int64_t{1} << 18);
  }
  return Planned(inputs);
}

std::string ModelPlanned(const std::string& model, int32_t layers, int32_t nodes, int32_t lanes) {
  PlanInputs inputs;
  inputs.nodes = nodes;
  inputs.lanes_per_node = lanes;
  inputs.layout = LayoutOf(*FindModelShapes(model, layers), nodes, lanes);
  return Planned(inputs);
}

std::string ShardedPlanned(const std::string& model, int32_t layers, int32_t nodes, int32_t lanes) {
  World world(nodes * lanes, nodes, lanes);
  for (int32_t rank = 0; rank < world.trainers(); ++rank) {
    world.registrations[rank] =
        ShardedRegistration(*FindModelShapes(model, layers), rank, world.trainers(), lanes);
  }
  return Planned(world.Inputs());
}

// AdamW tensors in columns, and in tiles of 4 by so many as it takes.
std::string TilesPlanned(int32_t nodes, int32_t lanes) {
  World world(nodes * lanes, nodes, lanes);
  const Parameter columns = AdamW("columns", {300, 640});
  const Parameter tiles = AdamW("tiles", {512, 96, 8});
  const Parameter matrix = Muon("matrix", {96, 640});
  const int32_t across = world.trainers() / 4;
  for (int32_t rank = 0; rank < world.trainers(); ++rank) {
    const int64_t width = 640 / world.trainers();
    world.Hold(rank, columns, {{0, rank * width}, {300, (rank + 1) * width}});
    world.Hold(rank, matrix, {{0, rank * width}, {96, (rank + 1) * width}});
    const int64_t row = rank / across;
    const int64_t col = rank % across;
    const int64_t cut = 96 / across;
    world.Hold(rank, tiles, {{row * 128, col * cut, 0}, {row * 128 + 128, col * cut + cut, 8}});
  }
  return Planned(world.Inputs());
}

std::string OneTrainerPlanned() {
  World world(1, 1, 1);
  for (int64_t i = 0; i < 300; ++i) {
    const Extents shape = {32 * (1 + i % 7), 48 * (1 + i % 5)};
    world.Replicate(i % 3 == 0 ? AdamW(absl::StrCat("v", i), {shape[0] * 10})
                               : Muon(absl::StrCat("m", i), shape));
  }
  return Planned(world.Inputs());
}

TEST(PlanDigestTest, KnownLayoutsArePlannedAsEver) {
  std::vector<std::string> planned;
  for (uint64_t seed = 1; seed <= 40; ++seed) planned.push_back(RandomPlanned(seed));
  planned.push_back(ModelPlanned("llama3-8b", 4, 1, 8));
  planned.push_back(ModelPlanned("llama3-8b", 2, 4, 4));
  planned.push_back(ModelPlanned("moonlight-moe", 2, 4, 4));
  planned.push_back(ModelPlanned("wall-x", 0, 1, 8));
  planned.push_back(ModelPlanned("qwen2.5-1.5b", 3, 2, 3));
  planned.push_back(ShardedPlanned("llama3-70b", 2, 8, 4));
  planned.push_back(ShardedPlanned("qwen3-1.7b", 2, 3, 5));
  planned.push_back(TilesPlanned(2, 2));
  planned.push_back(TilesPlanned(4, 8));
  planned.push_back(OneTrainerPlanned());
  const std::vector<std::string> expected = {
      "37071346e9a3d4f4 9c5fb4652efcbd9d",
      "d9d2d230c0465834 7aee5159b5c00aec",
      "ed61870676543ff5 40ef82506542f288",
      "f325fa2f22ddb320 8aff6049511cdc8c",
      "99d9853d44cbdb82 bc1f6f918777c8c9",
      "74f13104811bf787 7d9ef625d495ad5f",
      "b6a94fb3c5253ef3 aeb667b94963f552",
      "d0510d1bd9e7d632 80f93227c3c35bf1",
      "7e70fc56b38684c3 97772a68c64f55c0",
      "488c27013846fd44 7dbac54e9b8a0e77",
      "1bacaeb15c74df75 143bda855873f9ff",
      "b1ad5598ee208202 939362dee1f9f5c5",
      "RESOURCE_EXHAUSTED",
      "9f93c8ad5b6c95a8 7033ac74e9418c4e",
      "4a293b2d7eb78f3e 79bf5bcfbe369b4c",
      "78196203def77363 af77e6e62045543e",
      "2b58e1cbc5da019c 7125709a654e036a",
      "b1fa021d211db0be 8bc932a4b24860e3",
      "RESOURCE_EXHAUSTED",
      "c885fdaa9dc1068b 861b3d0fde258a6b",
      "f9302cd5d089265b 39aac9b23914ba4b",
      "ddce41a84bef2656 07613d032e1f81da",
      "ef385d2361924298 6a7031cdf29465dd",
      "191f093ff92f5c94 9d3aaadcdaa570c9",
      "f621354b2e857c12 091dfe2db498fae6",
      "e3132529d9850138 f0e4fb2d11b4370c",
      "ec7aa839197c6fbb b0da8b2815b97e9c",
      "835b21d432043cce cdca0511bed157ff",
      "RESOURCE_EXHAUSTED",
      "ad9edd4bbe41e6ec 2b66d192fcef6c2b",
      "018098b0df729c1e 974b6a3ae2182593",
      "7b87c6f310c3205e 73b06c3632698826",
      "56ea052d6721255c 0d986cf4c7335a16",
      "e1861d6bed9d1410 d84d96d39fb94d2f",
      "496b57732a53dab1 dcb62de5bb72f840",
      "db2754ddc40496a4 79b5ac3cf7504176",
      "53da5b6837a36f5e efd0fac6e535eed3",
      "6a19a8f45819a0b2 96d0421fc3f37708",
      "556fe9d9f9b62217 ffcb72bdfb7e7759",
      "7810ca46ecea28a8 62976b1a00b3e94d",
      "c0883c77d8522293 80a035472187fdcf",
      "fc3eb58ef925f746 284b9236ff6733da",
      "124ef22fba0f587e a1518a0072dd8e59",
      "3afa8e97d4623f3f d51c1bea73e407bd",
      "210829e905956a9d ba6347f11a4d5c6a",
      "3b84e7cda79108a9 63fbae90fc8381d0",
      "d88926de713bcb52 a0a145b8756431ab",
      "af3f8d9b4f2613b1 121f246518c963a4",
      "1fc729427d8673e5 dd9e4a7c4238e762",
      "dd70c8145dc683a9 754dcda1d0227aea",
  };
  EXPECT_THAT(planned, ElementsAreArray(expected));
  if (HasFailure()) {
    for (const std::string& digests : planned) printf("\"%s\",\n", digests.c_str());
  }
}

}  // namespace
}  // namespace dmuond::scheduler
