// The Muon update of one matrix on the CPU.
#ifndef DMUOND_KERNELS_CPU_MUON_H_
#define DMUOND_KERNELS_CPU_MUON_H_

#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "kernels/newton_schulz.h"
#include "kernels/ops.h"

namespace dmuond::kernels::cpu {

// Calls part(i) once for each i in [0, count), in any order, on whatever threads; returns when all
// have. The update is cut into parts by shape alone, so the bits do not depend on who runs them.
using Part = absl::FunctionRef<void(int64_t index)>;
using RunParts = absl::FunctionRef<void(int64_t count, Part part)>;

// Bytes of workspace that one matrix needs, a multiple of a cache line.
[[nodiscard]] size_t WorkspaceBytesPerMatrix(const NewtonSchulzProgram& program);

// REQUIRES: program was built from config for rows x cols = p x q or q x p; workspace is aligned to
// a cache line. Nothing allocates.
void UpdateMatrix(const MuonConfig& config, const NewtonSchulzProgram& program, DType weight_dtype,
                  const MuonMatrix& matrix, std::byte* workspace, RunParts run);

}  // namespace dmuond::kernels::cpu

#endif  // DMUOND_KERNELS_CPU_MUON_H_
