#include "bench/common/model.h"

#include <span>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

ABSL_FLAG(int32_t, trainers, 1, "internal: of the job");
ABSL_FLAG(std::string, address, "", "internal: the daemon's socket");
ABSL_FLAG(std::string, matrices, "", "internal: of the model, ROWSxCOLSxCOUNT,...");
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

int64_t MatrixElements(const Model& model) {
  int64_t elements = 0;
  for (const Matrices& equal : model.matrices) elements += equal.rows * equal.cols * equal.count;
  return elements;
}

int32_t ParametersOf(const Model& model) {
  int32_t parameters = model.vector > 0 ? 1 : 0;
  for (const Matrices& equal : model.matrices) parameters += equal.count;
  return parameters;
}

}  // namespace

int64_t Model::parameters() const { return MatrixElements(*this) + vector; }

int64_t Model::state_bytes() const { return (MatrixElements(*this) * 8) + (vector * 12); }

absl::StatusOr<client::Layout> MakeLayout(const Model& model, int trainers) {
  client::LayoutBuilder builder(trainers);
  int index = 0;
  for (const Matrices& equal : model.matrices) {
    for (int i = 0; i < equal.count; ++i) {
      builder.Add({.name = absl::StrCat("matrix", index++), .shape = {equal.rows, equal.cols}});
    }
  }
  if (model.vector > 0) {
    builder.Add({.name = "vector", .shape = {model.vector}, .route = client::Route::kAdamW});
  }
  return builder.Build();
}

std::vector<std::string> TrainerFlags(int32_t rank, int trainers, const std::string& address,
                                      const Model& model) {
  const auto format = [](std::string* out, const Matrices& equal) {
    absl::StrAppend(out, equal.rows, "x", equal.cols, "x", equal.count);
  };
  return {absl::StrCat("--trainer_rank=", rank), absl::StrCat("--trainers=", trainers),
          absl::StrCat("--address=", address),
          absl::StrCat("--matrices=", absl::StrJoin(model.matrices, ",", format)),
          absl::StrCat("--vector=", model.vector)};
}

Model ModelOfFlags() {
  Model model{.vector = absl::GetFlag(FLAGS_vector)};
  for (const auto text : absl::StrSplit(absl::GetFlag(FLAGS_matrices), ',', absl::SkipEmpty())) {
    const std::vector<std::string> numbers = absl::StrSplit(text, 'x');
    model.matrices.push_back({.rows = std::stoll(numbers.at(0)),
                              .cols = std::stoll(numbers.at(1)),
                              .count = std::stoi(numbers.at(2))});
  }
  return model;
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
