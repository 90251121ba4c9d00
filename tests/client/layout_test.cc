#include "dmuond/client/layout.h"

#include <unistd.h>

#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "dmuond/client/options.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dmuond::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(LayoutBuilder, ReplicatedParametersAreAveraged) {
  LayoutBuilder builder(4);
  EXPECT_EQ(builder.Add({.name = "w", .shape = {3, 5}}), 0);
  EXPECT_EQ(builder.Add({.name = "same", .shape = {2}, .contribution = Contribution::kSame}), 1);
  const absl::StatusOr<Layout> layout = builder.Build();
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->parameters[0].reduce_factor, 0.25);
  EXPECT_TRUE(layout->parameters[0].held_by_all);
  EXPECT_EQ(layout->parameters[1].reduce_factor, 1);
  EXPECT_FALSE(layout->parameters[1].held_by_all);
  EXPECT_THAT(layout->fragments[0].box.begin, ElementsAre(0, 0));
  EXPECT_THAT(layout->fragments[0].box.end, ElementsAre(3, 5));
  EXPECT_THAT(layout->fragments[0].weight.strides, ElementsAre(5, 1));
  EXPECT_EQ(layout->groups.size(), 1);
}

TEST(LayoutBuilder, TensorsLieOneAfterAnotherOnCacheLines) {
  LayoutBuilder builder(1);
  builder.Add({.name = "a", .shape = {17}});  // 68 bytes
  builder.Add({.name = "b",
               .shape = {33},
               .type = ElementType::kBFloat16,
               .gradient_type = ElementType::kFloat32});  // 66 bytes of weights, 132 of gradients
  builder.Add({.name = "c", .shape = {1}});
  const absl::StatusOr<Layout> layout = builder.Build();
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->fragments[1].weight.offset_bytes, 128);
  EXPECT_EQ(layout->fragments[2].weight.offset_bytes, 256);
  EXPECT_EQ(layout->fragments[2].gradient.offset_bytes, 128 + 192);
  ASSERT_EQ(layout->arenas.size(), 2);
  EXPECT_EQ(layout->arenas[0].id, kGradientArena);
  EXPECT_EQ(layout->arenas[0].size_bytes, 128 + 192 + 64);
  EXPECT_EQ(layout->arenas[1].id, kWeightArena);
  EXPECT_EQ(layout->arenas[1].size_bytes, 320);
}

TEST(LayoutBuilder, AShardHasItsOwnStridesAndIsNotAveraged) {
  LayoutBuilder builder(2);
  builder.Add({.name = "w", .shape = {8, 6}, .box = Box{{2, 3}, {5, 6}}});
  const absl::StatusOr<Layout> layout = builder.Build();
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->parameters[0].reduce_factor, 1);
  EXPECT_THAT(layout->fragments[0].gradient.strides, ElementsAre(3, 1));
  EXPECT_EQ(layout->arenas[0].size_bytes, 64);
}

TEST(LayoutBuilder, EmptyShardsAndTheTrainersOwnParametersTakeNoMemory) {
  LayoutBuilder builder(2);
  builder.Add({.name = "empty", .shape = {8, 6}, .box = Box{{8, 0}, {8, 6}}});
  builder.Add({.name = "own", .shape = {1000}, .route = Route::kTrainer});
  const absl::StatusOr<Layout> layout = builder.Build();
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->fragments.size(), 2);
  EXPECT_TRUE(layout->arenas.empty());
}

TEST(LayoutBuilder, WhatIsAddedLastIsReadyFirst) {
  LayoutBuilder builder(1);
  builder.Add({.name = "first", .shape = {1}});
  builder.Add({.name = "second", .shape = {1}});
  builder.Add({.name = "chosen", .shape = {1}, .ready_order = 7});
  const absl::StatusOr<Layout> layout = builder.Build();
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_GT(layout->parameters[0].ready_order, layout->parameters[1].ready_order);
  EXPECT_EQ(layout->parameters[2].ready_order, 7);
}

TEST(LayoutBuilder, ABoxOutsideItsShapeIsRefusedByName) {
  for (const Box& box :
       {Box{{0}, {7}}, Box{{-1, 0}, {2, 2}}, Box{{3, 0}, {2, 2}}, Box{{0, 0}, {4, 2}}}) {
    LayoutBuilder builder(1);
    builder.Add({.name = "wrong", .shape = {3, 2}, .box = box});
    const absl::Status status = builder.Build().status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("'wrong'"));
  }
}

TEST(LayoutBuilder, ShapesThatCannotBeCountedAreRefused) {
  LayoutBuilder builder(1);
  builder.Add({.name = "huge", .shape = {int64_t{1} << 40, int64_t{1} << 40}});
  EXPECT_TRUE(absl::IsInvalidArgument(builder.Build().status()));
}

class Environment : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name :
         {"DMUOND_ADDRESS", "DMUOND_JOB", "RANK", "WORLD_SIZE", "LOCAL_RANK", "DMUOND_RESUME",
          "DMUOND_POISON", "DMUOND_TOKEN_FILE", "DMUOND_LAUNCH", "TORCHELASTIC_RUN_ID",
          "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE",
          "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"}) {
      ::unsetenv(name);
    }
  }
  static void Set(const char* name, const std::string& value) { ::setenv(name, value.c_str(), 1); }
};

TEST_F(Environment, NothingSetMeansTheDefaults) {
  const absl::StatusOr<Options> options = OptionsFromEnvironment();
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->job, "default");
  EXPECT_EQ(options->rank, 0);
  EXPECT_EQ(options->world_size, 1);
  EXPECT_EQ(options->home_lane, -1);
  EXPECT_EQ(options->resume, Resume::kNever);
  EXPECT_FALSE(options->poison);
}

TEST_F(Environment, TorchrunsVariablesAndOursAreRead) {
  Set("RANK", "5");
  Set("WORLD_SIZE", "8");
  Set("LOCAL_RANK", "1");
  Set("DMUOND_JOB", "llama");
  Set("DMUOND_RESUME", "1");
  Set("DMUOND_POISON", "1");
  const absl::StatusOr<Options> options = OptionsFromEnvironment();
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->job, "llama");
  EXPECT_EQ(options->rank, 5);
  EXPECT_EQ(options->world_size, 8);
  EXPECT_EQ(options->home_lane, 1);
  EXPECT_EQ(options->resume, Resume::kIfPresent);
  EXPECT_TRUE(options->poison);
}

TEST_F(Environment, ADiscardBelongsToAStartAndIsNotRepeatedByARestart) {
  Set("DMUOND_RESUME", "discard");
  EXPECT_EQ(OptionsFromEnvironment()->resume, Resume::kDiscard);
  EXPECT_EQ(OptionsFromEnvironment()->launch, "");
  Set("MASTER_ADDR", "host");
  Set("MASTER_PORT", "29500");
  Set("SLURM_JOB_ID", "7");
  Set("SLURM_STEP_ID", "0");
  EXPECT_EQ(OptionsFromEnvironment()->launch, "master:host:29500/slurm:7.0.0");
  Set("WORLD_SIZE", "2");
  Set("LOCAL_WORLD_SIZE", "2");
  EXPECT_THAT(OptionsFromEnvironment()->launch,
              HasSubstr(absl::StrCat("/parent:", ::getppid(), ".")));
  Set("DMUOND_LAUNCH", "mine");
  EXPECT_EQ(OptionsFromEnvironment()->launch, "mine");
  Set("TORCHELASTIC_RESTART_COUNT", "1");
  EXPECT_EQ(OptionsFromEnvironment()->resume, Resume::kIfPresent);
  Set("DMUOND_RESUME", "yes");
  EXPECT_THAT(std::string(OptionsFromEnvironment().status().message()),
              HasSubstr("DMUOND_RESUME='yes'"));
}

TEST_F(Environment, AWrongVariableIsNamed) {
  Set("WORLD_SIZE", "many");
  EXPECT_THAT(std::string(OptionsFromEnvironment().status().message()),
              HasSubstr("WORLD_SIZE='many'"));
  Set("WORLD_SIZE", "1");
  Set("DMUOND_TOKEN_FILE", "/nonexistent/token");
  EXPECT_THAT(std::string(OptionsFromEnvironment().status().message()),
              HasSubstr("/nonexistent/token"));
}

TEST_F(Environment, AnAddressIsAPathWithOrWithoutItsScheme) {
  EXPECT_EQ(*SocketPath("/run/d.sock"), "/run/d.sock");
  EXPECT_EQ(*SocketPath("unix:/run/d.sock"), "/run/d.sock");
  EXPECT_EQ(*SocketPath("unix:///run/d.sock"), "/run/d.sock");
  Set("DMUOND_ADDRESS", "unix:/run/e.sock");
  EXPECT_EQ(*SocketPath(""), "/run/e.sock");
  ::unsetenv("DMUOND_ADDRESS");
  Set("XDG_RUNTIME_DIR", "/run/user/7");
  EXPECT_THAT(*SocketPath(""), HasSubstr("/run/user/7/dmuond-"));
}

TEST_F(Environment, WhatCannotBeASocketsPathIsRefused) {
  EXPECT_TRUE(absl::IsInvalidArgument(SocketPath("localhost:50051").status()));
  EXPECT_TRUE(SocketPath("/" + std::string(99, 'x')).ok());
  const absl::Status too_long = SocketPath("/" + std::string(100, 'x')).status();
  EXPECT_TRUE(absl::IsInvalidArgument(too_long));
  EXPECT_THAT(std::string(too_long.message()),
              HasSubstr("x.attach' has 108 bytes, at most 107 are possible"));
}

}  // namespace
}  // namespace dmuond::client
