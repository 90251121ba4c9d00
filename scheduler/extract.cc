#include "scheduler/extract.h"

#include <algorithm>
#include <cstddef>

namespace dmuond::scheduler {
namespace {

// Cut along the first dimension that has more than one index; where one index of it is too much,
// along the next ones, too.
void Add(const Box& box, std::vector<Box>& extracts) {
  const int64_t elements = Elements(box);
  if (elements <= kExtractElementsMax) {
    extracts.push_back(box);
    return;
  }
  size_t d = 0;
  while (box.end[d] - box.begin[d] == 1) ++d;
  const int64_t of_one = elements / (box.end[d] - box.begin[d]);
  const int64_t indices = std::max<int64_t>(1, kExtractElementsMax / of_one);
  Box part = box;
  for (int64_t begin = box.begin[d]; begin < box.end[d]; begin += indices) {
    part.begin[d] = begin;
    part.end[d] = std::min(begin + indices, box.end[d]);
    Add(part, extracts);
  }
}

}  // namespace

std::vector<Box> Extracts(const Box& box) {
  std::vector<Box> extracts;
  Add(box, extracts);
  return extracts;
}

}  // namespace dmuond::scheduler
