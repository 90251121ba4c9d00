#include "scheduler/batch_cost.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "scheduler/limits.h"

namespace dmuond::scheduler {

Nanoseconds FromMicroseconds(double microseconds) {
  // Half an hour in one batch is an error of the table; the cap keeps sums over kUnitsMax units
  // within 63 bits.
  constexpr double kMax = 2e12;
  return static_cast<Nanoseconds>(std::llround(std::clamp(microseconds * 1e3, 0.0, kMax)));
}

double ToMicroseconds(Nanoseconds time) { return static_cast<double>(time) / 1e3; }

BatchCost::BatchCost(const CostModel& model, const MatrixKind& matrix, int32_t count,
                     int32_t batch_max)
    : batch_max_(std::clamp(batch_max, 1, std::max(count, 1))),
      cost_(count + 1, 0),
      last_batch_(count + 1, 0) {
  std::vector<Nanoseconds> batch(batch_max_ + 1, 0);
  for (int32_t b = 1; b <= batch_max_; ++b) {
    batch[b] = std::max(batch[b - 1], FromMicroseconds(model.MatrixBatch(matrix, b)));
  }
  for (int32_t x = 1; x <= count; ++x) {
    cost_[x] = std::numeric_limits<Nanoseconds>::max();
    for (int32_t b = std::min(x, batch_max_); b >= 1; --b) {
      const Nanoseconds cost = batch[b] + cost_[x - b];
      if (cost >= cost_[x]) continue;
      cost_[x] = cost;
      last_batch_[x] = b;
    }
  }
}

std::vector<int32_t> BatchCost::Split(int32_t matrices) const {
  std::vector<int32_t> batches;
  for (int32_t x = matrices; x > 0; x -= last_batch_[x]) batches.push_back(last_batch_[x]);
  std::sort(batches.rbegin(), batches.rend());
  return batches;
}

int32_t PreferredBatch(const CostModel& model, const MatrixKind& matrix, int32_t count,
                       double slack) {
  const int32_t batch_max = std::clamp(count, 1, kBatchMax);
  double best = std::numeric_limits<double>::infinity();
  for (int32_t b = 1; b <= batch_max; ++b) {
    best = std::min(best, model.MatrixBatch(matrix, b) / b);
  }
  for (int32_t b = 1; b < batch_max; ++b) {
    if (model.MatrixBatch(matrix, b) / b <= (1 + slack) * best) return b;
  }
  return batch_max;
}

}  // namespace dmuond::scheduler
