#include "kernels/cpu/cpu_ops.h"

#include <algorithm>

#include "base/status_macros.h"
#include "kernels/cpu/adamw.h"
#include "kernels/cpu/box_walk.h"
#include "kernels/cpu/copy.h"
#include "kernels/cpu/norms.h"
#include "kernels/cpu/sum.h"
#include "kernels/task_checks.h"

namespace dmuond::kernels::cpu {
namespace {

static_assert(kPieceElements == kNormBlock);  // a piece of a sum is a block of its squares

int64_t PieceEnd(int64_t piece, int64_t elements) {
  return std::min(elements, (piece + 1) * kPieceElements);
}

}  // namespace

absl::Status CpuOps::Copy(Stream&, const StridedBox& dst, const StridedBox& src) {
  RETURN_IF_ERROR(CheckCopy(dst, src));
  if (Elements(dst) == 0) return absl::OkStatus();
  BoxWalk walk(dst);
  walk.Add(src);
  walk.Simplify();
  const int64_t elements = walk.elements();
  // One call per thread: memcpy is fastest on long runs.
  const int64_t parts =
      std::min<int64_t>(pool_.threads(), (elements + kPieceElements - 1) / kPieceElements);
  pool_.ParallelFor(parts, [&](int64_t part, int) {
    CopyElements(walk, dst, src, elements * part / parts, elements * (part + 1) / parts);
  });
  return absl::OkStatus();
}

absl::Status CpuOps::Fill(Stream&, const StridedBox& dst, float value) {
  RETURN_IF_ERROR(CheckBox(dst, "destination of a fill"));
  if (Elements(dst) == 0) return absl::OkStatus();
  BoxWalk walk(dst);
  walk.Simplify();
  pieces_.Clear();
  pieces_.AddElements(walk.elements());
  pool_.ParallelFor(pieces_.total(), [&](int64_t piece, int) {
    FillElements(walk, dst, value, piece * kPieceElements, PieceEnd(piece, walk.elements()));
  });
  return absl::OkStatus();
}

absl::Status CpuOps::Sum(Stream&, std::span<const SumTask> tasks) {
  pieces_.Clear();
  for (const SumTask& task : tasks) {
    RETURN_IF_ERROR(CheckSum(task));
    pieces_.AddElements(Elements(task.dst));
  }
  pool_.ParallelFor(pieces_.total(), [&](int64_t index, int) {
    const auto [item, piece] = pieces_.Locate(index);
    const SumTask& task = tasks[item];
    SumElements(task, piece * kPieceElements, PieceEnd(piece, Elements(task.dst)));
  });
  return absl::OkStatus();
}

absl::Status CpuOps::SumsOfSquares(Stream&, std::span<const NormTask> tasks) {
  pieces_.Clear();
  for (const NormTask& task : tasks) pieces_.Add(NormBlocks(task.first_element, task.elements));
  pool_.ParallelFor(pieces_.total(), [&](int64_t index, int) {
    const auto [item, block] = pieces_.Locate(index);
    const NormTask& task = tasks[item];
    const int64_t block_begin = (task.first_element / kNormBlock + block) * kNormBlock;
    const int64_t begin = std::max<int64_t>(0, block_begin - task.first_element);
    const int64_t end = std::min(task.elements, block_begin + kNormBlock - task.first_element);
    task.sums[block] = SumOfSquares(task.data + begin, end - begin);
  });
  return absl::OkStatus();
}

absl::Status CpuOps::UpdateAdamW(Stream&, std::span<const AdamWPiece> pieces) {
  pieces_.Clear();
  for (const AdamWPiece& piece : pieces) pieces_.AddElements(piece.elements);
  pool_.ParallelFor(pieces_.total(), [&](int64_t index, int) {
    const auto [item, part] = pieces_.Locate(index);
    const AdamWPiece& piece = pieces[item];
    UpdateAdamWElements(piece, part * kPieceElements, PieceEnd(part, piece.elements));
  });
  return absl::OkStatus();
}

}  // namespace dmuond::kernels::cpu
