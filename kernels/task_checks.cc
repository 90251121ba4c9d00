#include "kernels/task_checks.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/cpu/box_walk.h"

namespace dmuond::kernels {
namespace {

absl::Status CheckTree(const SumTask& task) {
  if (!task.levels.empty() && task.levels.size() != task.sources.size()) {
    return absl::InvalidArgumentError(absl::StrCat("a sum has ", task.sources.size(),
                                                   " sources and ", task.levels.size(), " levels"));
  }
  constexpr int64_t kLeavesMax = int64_t{1} << kSumLevelMax;
  int64_t leaves = 0;
  for (size_t i = 0; i < task.sources.size(); ++i) {
    const int level = task.levels.empty() ? 0 : task.levels[i];
    const int64_t own = int64_t{1} << std::min(level, kSumLevelMax + 1);
    if (leaves + own > kLeavesMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("a sum has more than ", kLeavesMax, " leaves"));
    }
    if (leaves % own != 0) {
      return absl::InvalidArgumentError(absl::StrCat("source ", i, " of a sum stands for ", own,
                                                     " leaves but begins at leaf ", leaves));
    }
    leaves += own;
  }
  return absl::OkStatus();
}

}  // namespace

int64_t Elements(const StridedBox& box) {
  int64_t elements = 1;
  for (int d = 0; d < box.dims; ++d) elements *= box.shape[d];
  return elements;
}

absl::Status CheckBox(const StridedBox& box, const char* role) {
  if (box.dims < 0 || box.dims > kDimsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(role, " has ", box.dims, " dimensions, at most ", kDimsMax, " are allowed"));
  }
  for (int d = 0; d < box.dims; ++d) {
    if (box.shape[d] < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(role, " has size ", box.shape[d], " in dimension ", d));
    }
  }
  if (box.data == nullptr && Elements(box) > 0) {
    return absl::InvalidArgumentError(absl::StrCat(role, " has no memory"));
  }
  return absl::OkStatus();
}

absl::Status CheckSameShape(const StridedBox& dst, const StridedBox& src) {
  if (dst.dims != src.dims) {
    return absl::InvalidArgumentError(
        absl::StrCat("destination has ", dst.dims, " dimensions, source ", src.dims));
  }
  for (int d = 0; d < dst.dims; ++d) {
    if (dst.shape[d] != src.shape[d]) {
      return absl::InvalidArgumentError(absl::StrCat(
          "destination has size ", dst.shape[d], " in dimension ", d, ", source ", src.shape[d]));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckCopy(const StridedBox& dst, const StridedBox& src) {
  RETURN_IF_ERROR(CheckBox(dst, "destination of a copy"));
  RETURN_IF_ERROR(CheckBox(src, "source of a copy"));
  return CheckSameShape(dst, src);
}

absl::Status CheckSum(const SumTask& task) {
  RETURN_IF_ERROR(CheckBox(task.dst, "destination of a sum"));
  if (task.dst.dtype != DType::kF32) {
    return absl::InvalidArgumentError(
        absl::StrCat("destination of a sum is ", Name(task.dst.dtype), ", not float32"));
  }
  if (task.squares != nullptr && Elements(task.dst) > 0) {
    cpu::BoxWalk walk(task.dst);
    walk.Simplify();
    if (!walk.single_run()) {
      return absl::InvalidArgumentError("a sum with squares has a destination with gaps");
    }
  }
  RETURN_IF_ERROR(CheckTree(task));
  for (const StridedBox& source : task.sources) {
    if (source.data == nullptr) continue;
    RETURN_IF_ERROR(CheckSameShape(task.dst, source));
  }
  return absl::OkStatus();
}

}  // namespace dmuond::kernels
