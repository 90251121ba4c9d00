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
      "edbce8c0e6bb47b4 9c5fb4652efcbd9d",
      "d7be46920839abf7 7aee5159b5c00aec",
      "da216cad8a1e6d62 40ef82506542f288",
      "d1916b98112aa03b 732a78114d797166",
      "98ab1e519cf975db f58d4e49b200f881",
      "26e7c6d9feabf350 b1661bf3e4027f6d",
      "97366cffa0e3cf2d 222230a3cf350aa0",
      "9383c193442f5ea1 c4177312bc88c951",
      "630ef1cb45d8f226 a14619dac138a88e",
      "9e3a2996e6039ca4 c375a5b071e1c29a",
      "54b790766defc1ad e1364cc8333492fa",
      "5ead760735ad3bd4 5dd7de67d9946f9b",
      "RESOURCE_EXHAUSTED",
      "27d95f8be40ab1a7 a9d6d2e04db56bab",
      "5dcdce59c7e14e22 79bf5bcfbe369b4c",
      "51fe701de8098dca 7fd606dc378d4a91",
      "4d026a3690f5f822 91372d8eab438fe2",
      "f1e5bed7d6251956 8bc932a4b24860e3",
      "RESOURCE_EXHAUSTED",
      "17ae2f08d5a6a0cb 14328930c5a73952",
      "3bd8873d7863b6eb 82bec35f48ef8160",
      "f626d1c08babce3b 07613d032e1f81da",
      "948c07d37d963f63 a47f2a43131f7fa8",
      "b0cf18e0320f0513 8d9c6fd5f26d3bae",
      "074bddd7a955f6b1 091dfe2db498fae6",
      "13e97390570fcda8 7a8ae42e31a39250",
      "a2a585a1f279f620 b0da8b2815b97e9c",
      "8e20710bc079ecae 73c7fe2d77a02ec7",
      "RESOURCE_EXHAUSTED",
      "dcbec26c5d651a44 ab2004da8e54a7d8",
      "5ad28de49f3cf925 a36633af493016fc",
      "b5e2889cd49c1ff1 bd0dea012a1952ab",
      "5afcaa0d63a748c5 3696e3b058ab63c2",
      "c9850e2952779197 d2c2125f749826b2",
      "f1643c3b0f98f94c 8484b2fbd433f39c",
      "f036e0003b4a82af bd69586400e586c4",
      "1938735ac77f121f efd0fac6e535eed3",
      "bf9c7193a34cea76 e38f0f667f3dfad4",
      "c199ac7316c0189f 1a6803071376255a",
      "cbea493ff1c21570 1d53b0cc634bf233",
      "822624f3b4e3a408 6d993586e6125463",
      "7457dbf3f619b982 6e3609edff13ce6f",
      "75e4af5288235086 8245836d5b11e8ba",
      "1bd84d4b95bd3c99 1a177f3188068e96",
      "365b156674ff250b ad593394886a219f",
      "1e23c54047461806 df57641d2395e777",
      "726dbb80081dcab4 f06f76e08d8712d3",
      "f71aa6d82d65caeb 53ddef66653939ad",
      "34b69cda189051cd 1e27a66eba20898e",
      "0bb18814cbcf88a7 b26218d16b2df130",
  };
  EXPECT_THAT(planned, ElementsAreArray(expected));
  if (HasFailure()) {
    for (const std::string& digests : planned) printf("\"%s\",\n", digests.c_str());
  }
}

}  // namespace
}  // namespace dmuond::scheduler
