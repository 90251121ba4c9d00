// What an update costs: c(shape, batch) in microseconds, from a measured table with interpolation
// or, where it has no entry, from FLOPs and bytes.
#ifndef DMUOND_SCHEDULER_COST_MODEL_H_
#define DMUOND_SCHEDULER_COST_MODEL_H_

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "scheduler/layout.h"

namespace dmuond::scheduler {

// How a matrix is orthogonalised, as far as time goes. Of its `steps` polynomials, `rounds` begin
// with a product X * X^T and end with one that rewrites X: in Gram form 1 + restarts, in standard
// form all. The values here are the default preset's.
struct Iteration {
  int32_t steps = 5;
  int32_t rounds = 2;
  auto operator<=>(const Iteration&) const = default;
};

// Matrices that take the same time.
struct MatrixKind {
  int64_t rows = 0;
  int64_t cols = 0;
  Iteration iteration;
  auto operator<=>(const MatrixKind&) const = default;
};

struct CostEntry {
  MatrixKind matrix;
  int32_t batch = 1;
  double microseconds = 0;  // for the whole batch
};
// All numbers above 0 and finite, and no more rounds than steps.
[[nodiscard]] bool IsPossible(const CostEntry& entry);

// What a device computes matrices of one shape with: results' bits depend on it, so that it belongs
// to the plan. The numbers are those of the enums of kernels/ops.h, which has the meaning.
struct ShapeChoice {
  int64_t rows = 0;
  int64_t cols = 0;
  ElementType dtype = ElementType::kF16;
  uint8_t engine = 0;
  uint8_t form = 0;
};

// Empty entries: the analytic default with the two rates below.
struct CostTable {
  std::string device;                // for which device, driver and build it was measured
  std::vector<CostEntry> entries;    // any order; sorted by the model
  std::vector<ShapeChoice> choices;  // of shapes that do not take the device's default
  // These three foretell what an H200 takes for 27 shapes, in batches of 1 to 24, to 8 %
  // (bench/results/h200).
  double tflops = 650;                   // of the symmetric products of Newton-Schulz
  double gigabytes_per_second = 3700;    // passes over memory
  double launch_us = 140;                // a batch's first loads, last stores and launches
  double piece_bytes_per_element = 32;   // AdamW traffic
  double matrix_bytes_per_element = 38;  // passes around Newton-Schulz
};

// The analytic default of a lane that is `threads` cores of a CPU: rough, so that times which the
// planner gives are of the right order. Tables measured on the machine do better.
[[nodiscard]] CostTable CpuCosts(int32_t threads);

class CostModel {
 public:
  explicit CostModel(CostTable table);
  // Time of updating `batch` such matrices together. Monotone in batch.
  [[nodiscard]] double MatrixBatch(const MatrixKind& matrix, int32_t batch) const;
  // Proportional to the elements: the pieces of a lane are updated in few launches.
  [[nodiscard]] double Piece(int64_t elements) const;

 private:
  CostTable table_;
};

// FLOPs of Newton-Schulz on symmetric products, of which one triangle is computed (docs/maths.md
// section 3). The restart that the default preset adds in nearly square matrices is not counted: up
// to 4 %.
[[nodiscard]] double NewtonSchulzFlops(const MatrixKind& matrix);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_COST_MODEL_H_
