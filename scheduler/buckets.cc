#include "scheduler/buckets.h"

#include <algorithm>

#include "scheduler/limits.h"

namespace dmuond::scheduler {
namespace {

// Per parameter: gradient bytes on the trainer that holds most of it.
std::vector<int64_t> LargestShares(const Layout& layout) {
  std::vector<int64_t> shares(layout.parameters.size(), 0);
  int64_t share = 0;
  for (size_t f = 0; f < layout.fragments.size(); ++f) {
    const LayoutFragment& fragment = layout.fragments[f];
    const bool same_holder = f > 0 && layout.fragments[f - 1].parameter == fragment.parameter &&
                             layout.fragments[f - 1].rank == fragment.rank;
    if (!same_holder) share = 0;
    share += Elements(fragment.box) * SizeOf(layout.parameters[fragment.parameter].gradient_type);
    shares[fragment.parameter] = std::max(shares[fragment.parameter], share);
  }
  return shares;
}

Buckets Cut(const std::vector<int32_t>& order, const std::vector<int64_t>& shares,
            int64_t bucket_bytes) {
  Buckets buckets{0, std::vector<int32_t>(shares.size(), -1)};
  int64_t filled = 0;
  for (int32_t p : order) {
    if (buckets.count == 0 || filled + shares[p] > bucket_bytes) {
      ++buckets.count;
      filled = 0;
    }
    filled += shares[p];
    buckets.of_parameter[p] = buckets.count - 1;
  }
  return buckets;
}

}  // namespace

Buckets MakeBuckets(const Layout& layout, int64_t bucket_bytes) {
  std::vector<int32_t> order;
  for (size_t p = 0; p < layout.parameters.size(); ++p) {
    if (layout.parameters[p].route != Route::kTrainer) order.push_back(static_cast<int32_t>(p));
  }
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return layout.parameters[a].ready_order < layout.parameters[b].ready_order;
  });
  const std::vector<int64_t> shares = LargestShares(layout);
  Buckets buckets = Cut(order, shares, bucket_bytes);
  while (buckets.count > kBucketsMax) {
    bucket_bytes = std::max<int64_t>(2, bucket_bytes) * 2;
    buckets = Cut(order, shares, bucket_bytes);
  }
  return buckets;
}

}  // namespace dmuond::scheduler
