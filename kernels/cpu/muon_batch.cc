// CpuOps' part that shares a batch of matrices out among the lane's threads.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/muon.h"

namespace dmuond::kernels::cpu {

size_t CpuOps::MuonWorkspaceBytes(int64_t rows, int64_t cols, int64_t matrices,
                                  const MuonConfig& config) const {
  const absl::StatusOr<const NewtonSchulzProgram*> program =
      programs_.Find(rows, cols, config.newton_schulz);
  if (!program.ok()) return 0;  // UpdateMuon says why
  const int64_t at_once = std::clamp<int64_t>(matrices, 1, pool_.threads());
  return WorkspaceBytesPerMatrix(**program) * static_cast<size_t>(at_once);
}

absl::Status CpuOps::UpdateMuon(Stream&, const MuonBatch& batch, void* workspace) {
  const MuonConfig& config = *batch.config;
  ASSIGN_OR_RETURN(const NewtonSchulzProgram* const found,
                   programs_.Find(batch.rows, batch.cols, config.newton_schulz));
  const NewtonSchulzProgram& program = *found;
  if (reinterpret_cast<uintptr_t>(workspace) % 64 != 0) {
    return absl::InvalidArgumentError("workspace is not aligned to 64 bytes");
  }
  auto* memory = static_cast<std::byte*>(workspace);
  const size_t bytes = WorkspaceBytesPerMatrix(program);
  // Whole matrices as long as every thread gets the same number of them; what is left over is done
  // one by one, all threads on the panels of each.
  const auto count = static_cast<int64_t>(batch.matrices.size());
  const int64_t whole = count / pool_.threads() * pool_.threads();
  pool_.ParallelFor(whole, [&](int64_t index, int worker) {
    UpdateMatrix(config, program, batch.weight_dtype, batch.matrices[index],
                 memory + bytes * static_cast<size_t>(worker), [](int64_t parts, Part part) {
                   for (int64_t i = 0; i < parts; ++i) part(i);
                 });
  });
  for (int64_t index = whole; index < count; ++index) {
    UpdateMatrix(config, program, batch.weight_dtype, batch.matrices[index], memory,
                 [&](int64_t parts, Part part) {
                   pool_.ParallelFor(parts, [&](int64_t i, int) { part(i); });
                 });
  }
  return absl::OkStatus();
}

}  // namespace dmuond::kernels::cpu
