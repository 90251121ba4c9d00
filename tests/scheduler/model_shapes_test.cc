#include "scheduler/model_shapes.h"

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dmuond::scheduler {
namespace {

using ::testing::HasSubstr;

nlohmann::json ToJson(const std::vector<ShapeCount>& shapes) {
  auto list = nlohmann::json::array();
  for (const ShapeCount& shape : shapes) {
    list.push_back(
        {{"name", shape.name}, {"rows", shape.rows}, {"cols", shape.cols}, {"count", shape.count}});
  }
  return list;
}

TEST(ModelShapesTest, FileForOtherLanguagesSaysTheSame) {
  nlohmann::json table = nlohmann::json::object();
  for (const std::string& name : ModelNames()) {
    const auto model = FindModelShapes(name);
    ASSERT_TRUE(model.ok()) << model.status();
    table[name] = {
        {"layers", model->layers}, {"muon", ToJson(model->muon)}, {"adamw", ToJson(model->adamw)}};
  }
  std::ifstream file("bench/shapes/models.json");
  ASSERT_TRUE(file) << "bench/shapes/models.json cannot be read";
  const auto expected = nlohmann::json::parse(file);
  EXPECT_EQ(table, expected) << "the file should be:\n" << table.dump(1);
}

int64_t CountTensors(const std::vector<ShapeCount>& shapes) {
  int64_t count = 0;
  for (const ShapeCount& shape : shapes) count += shape.count;
  return count;
}

TEST(ModelShapesTest, CountsAreThoseOfTheModels) {
  EXPECT_EQ(CountTensors(FindModelShapes("llama3-8b")->muon), 224);
  EXPECT_EQ(CountTensors(FindModelShapes("qwen2.5-7b")->muon), 196);
  EXPECT_EQ(CountTensors(FindModelShapes("moonlight-moe")->muon), 5184);
  EXPECT_EQ(CountTensors(FindModelShapes("wall-x")->muon), 417);
}

int64_t CountElements(const ModelShapes& model) {
  int64_t elements = 0;
  for (const auto* shapes : {&model.muon, &model.adamw}) {
    for (const ShapeCount& shape : *shapes) elements += shape.rows * shape.cols * shape.count;
  }
  return elements;
}

// As the models' authors publish them: a wrong row would show here.
TEST(ModelShapesTest, ElementsAddUpToThePublishedSizes) {
  EXPECT_EQ(CountElements(*FindModelShapes("llama3-8b")), 8'030'261'248);
  EXPECT_EQ(CountElements(*FindModelShapes("llama3-70b")), 70'553'706'496);
  EXPECT_EQ(CountElements(*FindModelShapes("qwen2.5-1.5b")), 1'543'714'304);
  EXPECT_EQ(CountElements(*FindModelShapes("qwen2.5-7b")), 7'615'616'512);
}

TEST(ModelShapesTest, DepthIsAParameter) {
  const auto shallow = FindModelShapes("moonlight-moe", 2);
  ASSERT_TRUE(shallow.ok());
  EXPECT_EQ(shallow->layers, 2);
  EXPECT_EQ(CountTensors(shallow->muon), 384);
  // What a model has once does not grow with its depth.
  EXPECT_EQ(FindModelShapes("llama3-8b", 64)->adamw.front().count, 2);
}

TEST(ModelShapesTest, BadRequestsNameWhatIsWrong) {
  EXPECT_THAT(FindModelShapes("llama9").status().ToString(), HasSubstr("llama3-8b"));
  EXPECT_EQ(FindModelShapes("llama9").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(FindModelShapes("wall-x", 4).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FindModelShapes("llama3-8b", -1).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace dmuond::scheduler
