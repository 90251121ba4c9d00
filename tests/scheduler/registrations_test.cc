#include "scheduler/convert/registrations.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/convert/convert.h"
#include "scheduler/model_layout.h"
#include "scheduler/plan.h"
#include "tests/scheduler/chance.h"
#include "tests/scheduler/layouts.h"

namespace dmuond {
namespace {

using scheduler::testing::Chance;
using scheduler::testing::World;
using ::testing::HasSubstr;

using ByRank = std::map<int32_t, v1::Registration>;

ByRank OnTheWire(const World& world) {
  ByRank registrations;
  for (const scheduler::Registration& registration : world.registrations) {
    v1::Registration wire = ToProto(registration);
    wire.set_job("job");
    wire.set_world_size(world.trainers());
    wire.add_groups()->set_preset("keller");
    registrations[registration.rank.value()] = std::move(wire);
  }
  return registrations;
}

v1::PlanInputs InputsOf(const ByRank& registrations) {
  v1::PlanInputs inputs;
  inputs.set_nodes(1);
  inputs.set_lanes_per_node(1);
  GatheredRegistrations gathered;
  for (const auto& [rank, registration] : registrations) {
    EXPECT_TRUE(gathered.Set(registration));
    EXPECT_FALSE(gathered.Set(Pack(registration))) << "said twice";
  }
  EXPECT_TRUE(gathered.AddTo(inputs).ok());
  v1::PlanInputs received;
  EXPECT_TRUE(received.ParseFromString(inputs.SerializeAsString()));
  return received;
}

void ExpectAllComeBack(const ByRank& registrations, const std::string& what) {
  ByRank packed;
  for (const auto& [rank, registration] : registrations) {
    packed[rank] = Pack(registration);
    const auto unpacked = Unpack(packed[rank]);
    ASSERT_TRUE(unpacked.ok()) << what << unpacked.status();
    EXPECT_EQ(unpacked->SerializeAsString(), registration.SerializeAsString()) << what;
  }
  for (const ByRank* given : {&registrations, &std::as_const(packed)}) {
    const v1::PlanInputs inputs = InputsOf(*given);
    EXPECT_EQ(WorldSizeOf(inputs), registrations.size()) << what;
    for (const auto& [rank, registration] : registrations) {
      const auto again = RegistrationOf(inputs, rank);
      ASSERT_TRUE(again.ok()) << what << again.status();
      ASSERT_EQ(again->SerializeAsString(), registration.SerializeAsString())
          << what << ": rank " << rank;
    }
  }
}

// Every kind of sharding over `tensor` by `data` ranks, of two stages of a pipeline perhaps.
World RandomMesh(Chance& chance) {
  const auto tensor = static_cast<int32_t>(chance.Pick(1, 4));
  const auto data = static_cast<int32_t>(chance.Pick(1, 6));
  const auto stages = static_cast<int32_t>(chance.Pick(1, 2));
  World world(tensor * data * stages, static_cast<int32_t>(chance.Pick(1, 3)), 2);
  const auto chunk = [](int64_t extent, int32_t parts, int32_t part) {
    const int64_t size = (extent + parts - 1) / parts;
    return std::pair(std::min(extent, part * size), std::min(extent, (part + 1) * size));
  };
  for (int64_t p = chance.Pick(1, 8); p > 0; --p) {
    scheduler::Extents shape(chance.Pick(1, 3));
    for (int64_t& extent : shape) extent = chance.Pick(1, 40);
    const auto parameter = scheduler::testing::AdamW(absl::StrCat("p", p), shape);
    const bool sharded = chance.Of(70);
    const size_t tensor_dim = chance.Pick(0, static_cast<int64_t>(shape.size()) - 1);
    // A strided shard: what tensor parallel has cut along a dimension, FSDP cuts along it again.
    const bool data_first = chance.Of(50);
    const auto stage = static_cast<int32_t>(chance.Pick(0, stages - 1));
    for (int32_t rank = 0; rank < world.trainers(); ++rank) {
      if (rank % stages != stage) continue;
      const int32_t t = rank / stages % tensor;
      const int32_t d = rank / stages / tensor;
      scheduler::Box box = scheduler::WholeBox(shape);
      for (const bool of_data : {data_first, !data_first}) {
        const size_t dim = of_data ? 0 : tensor_dim;
        const int64_t extent = box.end[dim] - box.begin[dim];
        const auto [from, to] = of_data ? chunk(extent, data, d) : chunk(extent, tensor, t);
        if (!of_data || sharded) {
          box.end[dim] = box.begin[dim] + to;
          box.begin[dim] += from;
        }
      }
      world.Hold(rank, parameter, box);
    }
  }
  return world;
}

TEST(RegistrationsTest, ShardedOnesComeBackByteForByte) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    Chance chance(seed);
    ExpectAllComeBack(OnTheWire(RandomMesh(chance)), absl::StrCat("seed ", seed));
  }
}

// What the daemon has refused by then, and what it may have let pass: nothing is taken for granted.
TEST(RegistrationsTest, AnyNumbersAndMissingFieldsComeBackByteForByte) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    Chance chance(seed);
    ByRank registrations = OnTheWire(RandomMesh(chance));
    for (auto& [rank, registration] : registrations) {
      for (v1::Fragment& fragment : *registration.mutable_fragments()) {
        if (chance.Of(80)) continue;
        switch (chance.Pick(0, 4)) {
          case 0:
            fragment.clear_gradient();
            break;
          case 1:
            fragment.clear_box();
            break;
          case 2:
            fragment.mutable_weight()->add_strides(-1);
            break;
          case 3:
            fragment.mutable_weight()->set_offset_bytes(std::numeric_limits<int64_t>::min());
            break;
          default:
            fragment.mutable_gradient()->set_offset_bytes(std::numeric_limits<int64_t>::max());
        }
      }
    }
    ExpectAllComeBack(registrations, absl::StrCat("seed ", seed));
  }
}

TEST(RegistrationsTest, APlanOfClassesIsThePlanOfTheirRegistrations) {
  int classes = 0;
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    Chance chance(seed);
    const ByRank registrations = OnTheWire(RandomMesh(chance));
    const v1::PlanInputs in_classes = InputsOf(registrations);
    v1::PlanInputs one_by_one = in_classes;
    one_by_one.clear_classes();
    one_by_one.clear_registrations();
    for (const auto& [rank, one] : registrations) *one_by_one.add_registrations() = one;
    classes += in_classes.classes_size();
    std::string found[2];
    for (const v1::PlanInputs* wire : {&in_classes, &std::as_const(one_by_one)}) {
      auto inputs = FromProto(*wire);
      std::string& text = found[wire == &in_classes ? 0 : 1];
      text = inputs.status().ToString();
      if (!inputs.ok()) continue;
      inputs->nodes = 3;
      inputs->lanes_per_node = 2;
      const auto plan = scheduler::MakePlan(*inputs);
      ASSERT_TRUE(plan.ok()) << plan.status();
      text = absl::StrCat(plan->digest);
      for (size_t f = 0; f < inputs->layout.fragments.size(); ++f) {
        const scheduler::Fragment fragment = inputs->layout.FragmentAt(f);
        absl::StrAppend(&text, " ", fragment.gradient.offset_bytes, " ",
                        fragment.weight.offset_bytes, ToString(fragment.box));
      }
    }
    EXPECT_EQ(found[0], found[1]) << "seed " << seed;
  }
  EXPECT_GT(classes, 50);
}

TEST(RegistrationsTest, AThousandTrainersOfOneModelSayLittleMoreThanOne) {
  constexpr int32_t kTrainers = 1024;
  ByRank registrations;
  int64_t one_bytes = 0;
  for (int32_t rank = 0; rank < kTrainers; ++rank) {
    v1::Registration wire = ToProto(scheduler::ShardedRegistration(
        *scheduler::FindModelShapes("llama3-70b", 4), rank, kTrainers, 8));
    one_bytes = static_cast<int64_t>(wire.ByteSizeLong());
    registrations[rank] = Pack(std::move(wire));
  }
  const v1::PlanInputs inputs = InputsOf(registrations);
  EXPECT_EQ(inputs.classes_size(), 1);
  EXPECT_LT(static_cast<int64_t>(inputs.ByteSizeLong()), 3 * one_bytes);
}

v1::PlanInputs OneClass() {
  World world(3, 1, 1);
  world.ShardRows(scheduler::testing::Muon("w", {9, 4}));
  return InputsOf(OnTheWire(world));
}

TEST(RegistrationsTest, BrokenClassesAreRefused) {
  ASSERT_EQ(OneClass().classes_size(), 1);
  ASSERT_TRUE(FromProto(OneClass()).ok()) << FromProto(OneClass()).status();
  const auto refused = [](const std::function<void(v1::RegistrationClass&)>& spoil) {
    v1::PlanInputs inputs = OneClass();
    spoil(*inputs.mutable_classes(0));
    EXPECT_EQ(RegistrationOf(inputs, 1).status().code(), FromProto(inputs).status().code());
    return FromProto(inputs).status().ToString();
  };
  EXPECT_THAT(refused([](auto& c) { c.set_ranks(0); }), HasSubstr("plan without registrations"));
  EXPECT_THAT(refused([](auto& c) { c.set_ranks(-1); }), HasSubstr("plan without registrations"));
  EXPECT_THAT(refused([](auto& c) { c.set_ranks(1 << 20); }), HasSubstr("class of 1048576"));
  EXPECT_THAT(refused([](auto& c) { c.set_ranks(4); }), HasSubstr("not as long"));
  EXPECT_THAT(refused([](auto& c) { c.set_ranks(2); }), HasSubstr("not as long"));
  EXPECT_THAT(refused([](auto& c) { c.add_numbers(1); }), HasSubstr("numbers instead of"));
  EXPECT_THAT(refused([](auto& c) { c.add_column_of(0); }), HasSubstr("numbers instead of"));
  EXPECT_THAT(refused([](auto& c) { c.set_column_of(4, 99); }), HasSubstr("column 99"));
  EXPECT_THAT(refused([](auto& c) { c.mutable_columns(0)->set_runs(0, -1); }),
              HasSubstr("not as long"));
  EXPECT_THAT(refused([](auto& c) { c.set_column_of(0, 0); }), HasSubstr("rank 0 after 0"));
  EXPECT_THAT(refused([](auto& c) { c.set_numbers(1, -1); }), HasSubstr("-1"));
  EXPECT_THAT(refused([](auto& c) { c.mutable_common()->clear_fragments(); }),
              HasSubstr("numbers instead of"));
}

// A few kilobytes can say so many that no memory suffices.
TEST(RegistrationsTest, MoreFragmentsThanAJobCanHaveAreRefusedBeforeTheyAreMade) {
  v1::PlanInputs inputs = OneClass();
  v1::RegistrationClass& one = *inputs.mutable_classes(0);
  while (one.common().fragments_size() < 1024) one.mutable_common()->add_fragments();
  one.set_ranks(1 << 16);
  one.clear_columns();
  one.add_columns()->add_runs((1 << 16) - 1);
  one.mutable_columns(0)->add_runs(1);
  std::fill(one.mutable_column_of()->begin(), one.mutable_column_of()->end(), 0);
  one.set_column_of(0, 1);
  EXPECT_THAT(FromProto(inputs).status().ToString(), HasSubstr("67108864 fragments"));
}

TEST(RegistrationsTest, ARankInTwoClassesIsRefused) {
  v1::PlanInputs inputs = OneClass();
  *inputs.add_classes() = v1::RegistrationClass(inputs.classes(0));
  EXPECT_THAT(FromProto(inputs).status().ToString(), HasSubstr("registered twice"));
}

TEST(RegistrationsTest, WhoHasNotRegisteredIsNotFound) {
  EXPECT_EQ(RegistrationOf(OneClass(), 3).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(WorldSizeOf({}), 0);
  EXPECT_EQ(AnyOf({}).world_size(), 0);
}

TEST(RegistrationsTest, WhoLeavesOrSaysSomethingElseTakesNothingFromTheOthers) {
  World world(4, 1, 1);
  world.ShardRows(scheduler::testing::Muon("w", {9, 4}));
  ByRank registrations = OnTheWire(world);
  GatheredRegistrations gathered;
  for (const auto& [rank, registration] : registrations) gathered.Set(registration);
  // The first of the class, by whose numbers the others are known.
  gathered.Erase(0);
  EXPECT_FALSE(gathered.Contains(0));
  registrations[2].mutable_fragments(0)->mutable_weight()->set_offset_bytes(4096);
  EXPECT_TRUE(gathered.Set(registrations[2]));
  registrations.erase(0);
  v1::PlanInputs inputs;
  EXPECT_TRUE(gathered.AddTo(inputs).ok());
  EXPECT_EQ(inputs.SerializeAsString(), [&] {
    GatheredRegistrations of_the_rest;
    for (const auto& [rank, registration] : registrations) of_the_rest.Set(registration);
    v1::PlanInputs wanted;
    EXPECT_TRUE(of_the_rest.AddTo(wanted).ok());
    return wanted.SerializeAsString();
  }());
}

TEST(RegistrationsTest, PackedBytesThatCannotBeAreRefused) {
  v1::Registration packed =
      Pack(OnTheWire(World(1, 1, 1).Replicate(scheduler::testing::Muon("w", {4, 4})))[0]);
  v1::Registration longer = packed;
  longer.add_numbers(1);
  EXPECT_THAT(Unpack(longer).status().ToString(), HasSubstr("numbers instead of"));
  packed.set_common("no message");
  EXPECT_THAT(Unpack(packed).status().ToString(), HasSubstr("cannot be read"));
  v1::PlanInputs inputs;
  GatheredRegistrations gathered;
  gathered.Set(packed);
  EXPECT_FALSE(gathered.AddTo(inputs).ok());
}

}  // namespace
}  // namespace dmuond
