#include "scheduler/cost_model.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

namespace dmuond::scheduler {
namespace {

// Time of a batch without any measurement.
double Analytic(const CostTable& table, const MatrixKind& matrix, int32_t batch) {
  const double flops_us = NewtonSchulzFlops(matrix) / (table.tflops * 1e6);
  const double bytes = static_cast<double>(matrix.rows) * static_cast<double>(matrix.cols) *
                       table.matrix_bytes_per_element;
  return table.launch_us + batch * (flops_us + bytes / (table.gigabytes_per_second * 1e3));
}

// Straight lines between the measured batch sizes of one shape [first, last), made monotone. Below
// the smallest the fixed cost stays and the rest scales; beyond the largest the last slope goes on.
double Interpolate(const CostEntry* first, const CostEntry* last, double launch_us, int32_t batch) {
  double before = std::min(launch_us, first->microseconds);  // at batch 0
  int32_t before_batch = 0;
  double slope = 0;
  for (const CostEntry* entry = first; entry != last; ++entry) {
    const double here = std::max(before, entry->microseconds);
    slope = (here - before) / (entry->batch - before_batch);
    if (batch <= entry->batch) return before + slope * (batch - before_batch);
    before = here;
    before_batch = entry->batch;
  }
  return before + slope * (batch - before_batch);
}

}  // namespace

double NewtonSchulzFlops(const MatrixKind& matrix) {
  const auto p = static_cast<double>(std::min(matrix.rows, matrix.cols));
  const auto q = static_cast<double>(std::max(matrix.rows, matrix.cols));
  const double steps = matrix.iteration.steps;
  const double rounds = matrix.iteration.rounds;
  // A round: p^2 q for the triangle of X * X^T, 2 p^2 q for the new X. A step: p^3 each for Z, Q, V
  // and the next R, but the first of a round has its Q without a product, and the last needs no R.
  return p * p * (3 * rounds * q + (4 * steps - 3 * rounds) * p);
}

CostTable CpuCosts(int32_t threads) {
  // Cores share the way to memory: the second one adds little to it, the tenth nothing.
  constexpr double kTflopsPerThread = 0.05;
  constexpr double kGigabytesPerThread = 6;
  constexpr double kGigabytesMax = 24;
  constexpr double kLaunchMicroseconds = 20;
  CostTable table;
  table.tflops = kTflopsPerThread * threads;
  table.gigabytes_per_second = std::min(kGigabytesPerThread * threads, kGigabytesMax);
  table.launch_us = kLaunchMicroseconds;
  return table;
}

bool IsPossible(const CostEntry& entry) {
  const MatrixKind& matrix = entry.matrix;
  return matrix.rows > 0 && matrix.cols > 0 && matrix.iteration.rounds > 0 &&
         matrix.iteration.steps >= matrix.iteration.rounds && entry.batch > 0 &&
         std::isfinite(entry.microseconds) && entry.microseconds > 0;
}

CostModel::CostModel(CostTable table) : table_(std::move(table)) {
  std::erase_if(table_.entries, [](const CostEntry& entry) { return !IsPossible(entry); });
  const auto key = [](const CostEntry& e) { return std::tuple(e.matrix, e.batch, e.microseconds); };
  std::sort(table_.entries.begin(), table_.entries.end(),
            [&](const CostEntry& a, const CostEntry& b) { return key(a) < key(b); });
  // Of several measurements of one batch the fastest: the others were disturbed.
  const auto same = [](const CostEntry& a, const CostEntry& b) {
    return a.matrix == b.matrix && a.batch == b.batch;
  };
  table_.entries.erase(std::unique(table_.entries.begin(), table_.entries.end(), same),
                       table_.entries.end());
}

double CostModel::MatrixBatch(const MatrixKind& matrix, int32_t batch) const {
  if (batch <= 0) return 0;
  const auto& entries = table_.entries;
  // The shape itself, or the same matrix the other way round.
  for (const MatrixKind& kind : {matrix, MatrixKind{matrix.cols, matrix.rows, matrix.iteration}}) {
    const auto first = std::ranges::lower_bound(entries, kind, {}, &CostEntry::matrix);
    const auto last = std::ranges::upper_bound(entries, kind, {}, &CostEntry::matrix);
    if (first != last) {
      return Interpolate(&*first, &*first + (last - first), table_.launch_us, batch);
    }
  }
  // Never measured: as much slower or faster than the formula as the matrix nearest in work.
  const double flops = NewtonSchulzFlops(matrix);
  double nearest = 0;
  double ratio = 1;
  for (const CostEntry& entry : entries) {
    const double other = NewtonSchulzFlops(entry.matrix);
    const double distance = std::max(flops / other, other / flops);
    if (nearest != 0 && distance >= nearest) continue;
    nearest = distance;
    const double formula = Analytic(table_, entry.matrix, entry.batch);
    ratio = formula > 0 ? entry.microseconds / formula : 1;
  }
  return ratio * Analytic(table_, matrix, batch);
}

double CostModel::Piece(int64_t elements) const {
  return static_cast<double>(elements) * table_.piece_bytes_per_element /
         (table_.gigabytes_per_second * 1e3);
}

}  // namespace dmuond::scheduler
