// The matrices of some well-known models, by name: what `dmuonctl plan --model` plans and what the
// benchmarks run. Pure data; safe from any thread.
//
//   absl::StatusOr<ModelShapes> model = FindModelShapes("llama3-8b");
//   for (const ShapeCount& shape : model->muon) …
//
// bench/shapes/models.json says the same for programs in other languages; a test compares the two.
#ifndef DMUOND_SCHEDULER_MODEL_SHAPES_H_
#define DMUOND_SCHEDULER_MODEL_SHAPES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dmuond::scheduler {

// `count` tensors of rows x cols elements; rows = fan-out. One-dimensional tensors have rows = 1.
struct ShapeCount {
  std::string name;  // what they are in the model: "mlp.gate_up"
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t count = 0;  // in the whole model

  bool operator==(const ShapeCount&) const = default;
};

struct ModelShapes {
  std::string name;
  int32_t layers = 0;             // 0: a mixture without one number of layers (wall-x)
  std::vector<ShapeCount> muon;   // matrices on route muon
  std::vector<ShapeCount> adamw;  // tensors on route adamw, the largest ones at least
};

// The model of that name. `layers` > 0 asks for another depth than the model's own.
// NOT_FOUND names the known models; INVALID_ARGUMENT: negative `layers`, or a depth asked of a
// model that has no single one.
[[nodiscard]] absl::StatusOr<ModelShapes> FindModelShapes(absl::string_view name,
                                                          int32_t layers = 0);

[[nodiscard]] std::vector<std::string> ModelNames();

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_MODEL_SHAPES_H_
