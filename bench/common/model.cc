#include "bench/common/model.h"

#include <span>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"

ABSL_FLAG(int32_t, trainers, 1, "internal: of the job");
ABSL_FLAG(std::string, address, "", "internal: the daemon's socket");
ABSL_FLAG(int64_t, rows, 0, "internal: of the model's matrices");
ABSL_FLAG(int64_t, cols, 0, "internal: of the model's matrices");
ABSL_FLAG(int32_t, matrices, 0, "internal: of the model");
ABSL_FLAG(int64_t, vector, 0, "internal: elements of the model's vector");

namespace dmuond::bench {
namespace {

void Fill(std::span<float> values, uint32_t seed) {
  uint32_t state = seed;
  for (float& value : values) {
    state = state * 1664525U + 1013904223U;
    value = static_cast<float>(static_cast<int32_t>(state)) * 1e-11F;
  }
}

int32_t ParametersOf(const Model& model) { return model.matrices + (model.vector > 0 ? 1 : 0); }

}  // namespace

absl::StatusOr<client::Layout> MakeLayout(const Model& model, int trainers) {
  client::LayoutBuilder builder(trainers);
  for (int i = 0; i < model.matrices; ++i) {
    builder.Add({.name = absl::StrCat("matrix", i), .shape = {model.rows, model.cols}});
  }
  if (model.vector > 0) {
    builder.Add({.name = "vector", .shape = {model.vector}, .route = client::Route::kAdamW});
  }
  return builder.Build();
}

std::vector<std::string> TrainerFlags(int32_t rank, int trainers, const std::string& address,
                                      const Model& model) {
  return {absl::StrCat("--trainer_rank=", rank),  absl::StrCat("--trainers=", trainers),
          absl::StrCat("--address=", address),    absl::StrCat("--rows=", model.rows),
          absl::StrCat("--cols=", model.cols),    absl::StrCat("--matrices=", model.matrices),
          absl::StrCat("--vector=", model.vector)};
}

Model ModelOfFlags() {
  return {.rows = absl::GetFlag(FLAGS_rows),
          .cols = absl::GetFlag(FLAGS_cols),
          .matrices = absl::GetFlag(FLAGS_matrices),
          .vector = absl::GetFlag(FLAGS_vector)};
}

int TrainersOfFlags() { return absl::GetFlag(FLAGS_trainers); }

std::string AddressOfFlags() { return absl::GetFlag(FLAGS_address); }

void FillWeights(client::Session& session, const Model& model) {
  for (int32_t i = 0; i < ParametersOf(model); ++i) Fill(session.Weight<float>(i), i);
}

void FillGradients(client::Session& session, const Model& model, int32_t rank) {
  for (int32_t i = 0; i < ParametersOf(model); ++i) {
    Fill(session.Gradient<float>(i), 1000 + i + rank);
  }
}

}  // namespace dmuond::bench
