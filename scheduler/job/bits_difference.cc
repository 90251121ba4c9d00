#include "scheduler/job/bits_difference.h"

#include "absl/strings/str_cat.h"

namespace dmuond::scheduler {
namespace {

void Compare(const std::string& what, const std::string& began, const std::string& now,
             std::vector<BitsDifference>& differences) {
  if (began != now) differences.push_back({what, began, now});
}

}  // namespace

std::vector<BitsDifference> CodeDifferences(const v1::LaneBits& began, const v1::LaneBits& now,
                                            Between between) {
  std::vector<BitsDifference> differences;
  for (const v1::LaneBits::Module& module : now.modules()) {
    if (between == Between::kNodes && module.program()) continue;
    for (const v1::LaneBits::Module& before : began.modules()) {
      if (before.name() != module.name()) continue;
      Compare(absl::StrCat(module.name(), " (", module.path(), ")"), before.id(), module.id(),
              differences);
    }
  }
  Compare("hash of lane and kernels", began.code(), now.code(), differences);
  Compare("digest of the C library's functions", began.functions(), now.functions(), differences);
  return differences;
}

std::vector<BitsDifference> DeviceDifferences(const v1::LaneBits& began, const v1::LaneBits& now) {
  std::vector<BitsDifference> differences;
  Compare("numeric library", began.library(), now.library(), differences);
  Compare("core type", began.core_type(), now.core_type(), differences);
  return differences;
}

}  // namespace dmuond::scheduler
