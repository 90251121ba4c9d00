// Decides how many matrices of each shape every lane owns. Matrices of one shape are
// interchangeable here, so the variables are counts; placement.h decides later which matrix goes
// where.
#ifndef DMUOND_SCHEDULER_ASSIGNMENT_H_
#define DMUOND_SCHEDULER_ASSIGNMENT_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "scheduler/batch_cost.h"

namespace dmuond::scheduler {

// Matrices that cost the same and may share a batch.
struct MatrixClass {
  MatrixKind matrix;
  int32_t count = 0;
  int64_t slot_bytes = 0;     // state of one matrix
  int64_t staging_bytes = 0;  // gradient and new weight of one matrix
};

struct AssignmentProblem {
  const CostModel* model = nullptr;
  std::vector<MatrixClass> classes;
  std::vector<Nanoseconds> base_load;  // per lane: work that it has in any case
  std::vector<int64_t> base_bytes;     // per lane: memory that is taken already
  int64_t memory_bytes = 0;            // per lane; 0: no limit
  double batch_slack = 0.01;           // as PreferredBatch() takes it
  // Work that can be spread over lanes at will afterwards (pieces of replicated tensors); counts in
  // the lower bound.
  Nanoseconds divisible = 0;
};

struct Assignment {
  std::vector<std::vector<int32_t>> counts;  // [lane][class]
  std::vector<BatchCost> costs;              // per class, with the batch sizes that fit the memory
  std::vector<Nanoseconds> load;             // per lane: base_load and matrices, nothing divisible
  std::vector<int64_t> bytes;                // per lane: base_bytes, matrices and spare slots
  Nanoseconds lower_bound = 0;               // no assignment's slowest lane takes less
};

// RESOURCE_EXHAUSTED, naming both byte counts, when memory does not suffice even without batches.
[[nodiscard]] absl::StatusOr<Assignment> Assign(const AssignmentProblem& problem);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_ASSIGNMENT_H_
