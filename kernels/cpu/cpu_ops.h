// Ops on the CPU. Calls are complete when they return. Inputs are checked where a wrong one would
// write outside a box; INVALID_ARGUMENT names the two values that disagree, and nothing is written.
#ifndef DMUOND_KERNELS_CPU_CPU_OPS_H_
#define DMUOND_KERNELS_CPU_CPU_OPS_H_

#include <span>

#include "kernels/cpu/pieces.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/newton_schulz.h"
#include "kernels/ops.h"

namespace dmuond::kernels::cpu {

// Threads: the lane's dispatching thread. The pool must outlive it.
class CpuOps final : public Ops {
 public:
  explicit CpuOps(ThreadPool& pool) : pool_(pool) {}

  absl::Status Copy(Stream& stream, const StridedBox& dst, const StridedBox& src) override;
  absl::Status Fill(Stream& stream, const StridedBox& dst, float value) override;
  absl::Status Sum(Stream& stream, std::span<const SumTask> tasks) override;
  absl::Status SumsOfSquares(Stream& stream, std::span<const NormTask> tasks) override;
  [[nodiscard]] size_t MuonWorkspaceBytes(int64_t rows, int64_t cols, int64_t matrices,
                                          const MuonConfig& config) const override;
  absl::Status UpdateMuon(Stream& stream, const MuonBatch& batch, void* workspace) override;
  absl::Status UpdateAdamW(Stream& stream, std::span<const AdamWPiece> pieces) override;

 private:
  ThreadPool& pool_;
  Pieces pieces_;  // of the call that runs
  mutable NewtonSchulzPrograms programs_;
};

}  // namespace dmuond::kernels::cpu

#endif  // DMUOND_KERNELS_CPU_CPU_OPS_H_
