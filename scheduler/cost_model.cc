#include "scheduler/cost_model.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace dmuond::scheduler {
namespace {

// Time of a batch without any measurement.
double Analytic(const CostTable& table, int64_t rows, int64_t cols, int32_t batch) {
  const double flops_us = NewtonSchulzFlops(rows, cols) / (table.tflops * 1e6);
  const double bytes =
      static_cast<double>(rows) * static_cast<double>(cols) * table.matrix_bytes_per_element;
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

double NewtonSchulzFlops(int64_t rows, int64_t cols) {
  const auto p = static_cast<double>(std::min(rows, cols));
  const auto q = static_cast<double>(std::max(rows, cols));
  return p * p * (6 * q + 14 * p);
}

CostTable CpuCosts(int32_t threads) {
  // Cores share the way to memory: the second one adds little to it, the tenth nothing.
  constexpr double kTflopsPerThread = 0.05;
  constexpr double kGigabytesPerThread = 6;
  constexpr double kGigabytesMax = 24;
  CostTable table;
  table.tflops = kTflopsPerThread * threads;
  table.gigabytes_per_second = std::min(kGigabytesPerThread * threads, kGigabytesMax);
  return table;
}

CostModel::CostModel(CostTable table) : table_(std::move(table)) {
  std::erase_if(table_.entries, [](const CostEntry& entry) {
    return entry.rows <= 0 || entry.cols <= 0 || entry.batch <= 0 || !(entry.microseconds > 0);
  });
  const auto key = [](const CostEntry& e) {
    return std::tuple(e.rows, e.cols, e.batch, e.microseconds);
  };
  std::sort(table_.entries.begin(), table_.entries.end(),
            [&](const CostEntry& a, const CostEntry& b) { return key(a) < key(b); });
  // Of several measurements of one batch the fastest: the others were disturbed.
  const auto same = [](const CostEntry& a, const CostEntry& b) {
    return a.rows == b.rows && a.cols == b.cols && a.batch == b.batch;
  };
  table_.entries.erase(std::unique(table_.entries.begin(), table_.entries.end(), same),
                       table_.entries.end());
}

double CostModel::MatrixBatch(int64_t rows, int64_t cols, int32_t batch) const {
  if (batch <= 0) return 0;
  const auto shape_of = [](const CostEntry& e) { return std::pair(e.rows, e.cols); };
  const auto shape_before = [&](const CostEntry& e, const std::pair<int64_t, int64_t>& shape) {
    return shape_of(e) < shape;
  };
  const auto& entries = table_.entries;
  // The shape itself, or the same matrix the other way round.
  for (const auto& shape : {std::pair(rows, cols), std::pair(cols, rows)}) {
    const auto first = std::lower_bound(entries.begin(), entries.end(), shape, shape_before);
    auto last = first;
    while (last != entries.end() && shape_of(*last) == shape) ++last;
    if (first != last) {
      return Interpolate(&*first, &*first + (last - first), table_.launch_us, batch);
    }
  }
  // Never measured: as much slower or faster than the formula as the shape nearest in work.
  const double flops = NewtonSchulzFlops(rows, cols);
  double nearest = 0;
  double ratio = 1;
  for (const CostEntry& entry : entries) {
    const double other = NewtonSchulzFlops(entry.rows, entry.cols);
    const double distance = std::max(flops / other, other / flops);
    if (nearest != 0 && distance >= nearest) continue;
    nearest = distance;
    const double formula = Analytic(table_, entry.rows, entry.cols, entry.batch);
    ratio = formula > 0 ? entry.microseconds / formula : 1;
  }
  return ratio * Analytic(table_, rows, cols, batch);
}

double CostModel::Piece(int64_t elements) const {
  return static_cast<double>(elements) * table_.piece_bytes_per_element /
         (table_.gigabytes_per_second * 1e3);
}

}  // namespace dmuond::scheduler
