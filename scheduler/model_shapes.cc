#include "scheduler/model_shapes.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace dmuond::scheduler {
namespace {

enum class Route { kMuon, kAdamW };

struct Row {
  const char* tensor;
  Route route;
  int64_t rows;
  int64_t cols;
  int64_t per_layer;  // how many in each layer
  int64_t once;       // how many in the model besides
};

struct Model {
  const char* name;
  int32_t layers;  // 0: every row counts by `once` alone
  std::vector<Row> rows;
};

constexpr Route kMuon = Route::kMuon;
constexpr Route kAdamW = Route::kAdamW;

// The rows of a decoder with gated feed-forward and grouped-query attention.
std::vector<Row> Decoder(int64_t hidden, int64_t inner, int64_t key_value, int64_t vocabulary,
                         int64_t embeddings) {
  return {
      {"mlp.gate_up", kMuon, inner, hidden, 2, 0},
      {"mlp.down", kMuon, hidden, inner, 1, 0},
      {"attention.q_o", kMuon, hidden, hidden, 2, 0},
      {"attention.k_v", kMuon, key_value, hidden, 2, 0},
      {"embedding", kAdamW, vocabulary, hidden, 0, embeddings},
      {"norm", kAdamW, 1, hidden, 2, 1},
  };
}

std::vector<Row> WithRows(std::vector<Row> rows, const std::vector<Row>& more) {
  rows.insert(rows.end(), more.begin(), more.end());
  return rows;
}

// Qwen2.5 has biases on q, k and v.
std::vector<Row> Biases(int64_t hidden, int64_t key_value) {
  return {{"attention.q_bias", kAdamW, 1, hidden, 1, 0},
          {"attention.k_v_bias", kAdamW, 1, key_value, 2, 0}};
}

// Sizes from the models' published configurations. Tied embeddings count once.
const std::vector<Model>& Models() {
  static const auto* const models = new std::vector<Model>{
      {"qwen2.5-1.5b", 28, WithRows(Decoder(1536, 8960, 256, 151936, 1), Biases(1536, 256))},
      {"llama3.2-3b", 28, Decoder(3072, 8192, 1024, 128256, 2)},
      {"qwen2.5-7b", 28, WithRows(Decoder(3584, 18944, 512, 152064, 2), Biases(3584, 512))},
      {"llama3-8b", 32, Decoder(4096, 14336, 1024, 128256, 2)},
      {"llama3-70b", 80, Decoder(8192, 28672, 1024, 128256, 2)},
      // Qwen3 normalises each head of 128 in q and in k.
      {"qwen3-1.7b", 28,
       WithRows(Decoder(2048, 6144, 1024, 151936, 1),
                {{"attention.head_norm", kAdamW, 1, 128, 2, 0}})},
      // The experts' matrices: 64 in each layer.
      {"moonlight-moe",
       27,
       {{"experts.gate_up", kMuon, 1408, 2048, 128, 0},
        {"experts.down", kMuon, 2048, 1408, 64, 0}}},
      // Three towers of different depth and width, and one projection.
      {"wall-x",
       0,
       {{"language.qkv", kMuon, 2560, 2048, 0, 36},
        {"language.o", kMuon, 2048, 2048, 0, 36},
        {"language.gate_up", kMuon, 22016, 2048, 0, 36},
        {"language.down", kMuon, 2048, 11008, 0, 36},
        {"action.qkv", kMuon, 2560, 1024, 0, 36},
        {"action.o", kMuon, 1024, 1024, 0, 36},
        {"action.gate_up", kMuon, 4096, 1024, 0, 36},
        {"action.down", kMuon, 1024, 2048, 0, 36},
        {"vision.qkv", kMuon, 3840, 1280, 0, 32},
        {"vision.o", kMuon, 1280, 1280, 0, 32},
        {"vision.gate_up", kMuon, 6912, 1280, 0, 32},
        {"vision.down", kMuon, 1280, 3456, 0, 32},
        {"projection", kMuon, 5120, 5120, 0, 1}}},
  };
  return *models;
}

ModelShapes Expand(const Model& model, int32_t layers) {
  ModelShapes shapes{.name = model.name, .layers = layers};
  for (const Row& row : model.rows) {
    auto& into = row.route == Route::kMuon ? shapes.muon : shapes.adamw;
    into.push_back({.name = row.tensor,
                    .rows = row.rows,
                    .cols = row.cols,
                    .count = row.per_layer * layers + row.once});
  }
  return shapes;
}

}  // namespace

absl::StatusOr<ModelShapes> FindModelShapes(absl::string_view name, int32_t layers) {
  for (const Model& model : Models()) {
    if (name != model.name) continue;
    if (layers < 0 || (layers > 0 && model.layers == 0)) {
      return absl::InvalidArgumentError(
          absl::StrCat("model ", name, ": layers = ", layers,
                       model.layers == 0 ? ", but it has no single number of layers; leave it out"
                                         : ", must be positive"));
    }
    return Expand(model, layers > 0 ? layers : model.layers);
  }
  return absl::NotFoundError(
      absl::StrCat("no model named '", name, "'; known are ", absl::StrJoin(ModelNames(), ", ")));
}

std::vector<std::string> ModelNames() {
  std::vector<std::string> names;
  for (const Model& model : Models()) names.emplace_back(model.name);
  return names;
}

}  // namespace dmuond::scheduler
