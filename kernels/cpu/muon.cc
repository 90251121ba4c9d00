#include "kernels/cpu/cpu_ops.h"

namespace dmuond::kernels::cpu {

size_t CpuOps::MuonWorkspaceBytes(int64_t, int64_t, int64_t, const MuonConfig&) const { return 0; }

absl::Status CpuOps::UpdateMuon(Stream&, const MuonBatch&, void*) {
  return absl::UnimplementedError("Muon on the CPU");
}

}  // namespace dmuond::kernels::cpu
