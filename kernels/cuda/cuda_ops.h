// Ops on a Hopper GPU. Calls enqueue kernels and copies into the stream and return.
// Momentum, sums, AdamW, and masters for a given direction have the bits of the CPU device; sums of
// squares and Newton-Schulz add in another order.
#ifndef DMUOND_KERNELS_CUDA_CUDA_OPS_H_
#define DMUOND_KERNELS_CUDA_CUDA_OPS_H_

#include <array>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "kernels/cuda/driver.h"
#include "kernels/cuda/element_passes.h"
#include "kernels/cuda/muon_graph.h"
#include "kernels/cuda/strided_passes.h"
#include "kernels/newton_schulz.h"
#include "kernels/ops.h"

namespace dmuond::kernels::cuda {

// Threads: the lane's dispatching thread. Boxes that are not contiguous, or are converted, lie in
// memory that the device can access; contiguous copies may have the process's own memory on a side.
// INVALID_ARGUMENT: as the CPU's, and matrices or pieces not aligned to 16 bytes.
class CudaOps final : public Ops {
 public:
  // `engine`: what ProductEngine::kDefault stands for here.
  CudaOps(const Driver& driver, ProductEngine engine);

  absl::Status Copy(Stream& stream, const StridedBox& dst, const StridedBox& src) override;
  // Runs and rows between two devices' memories, or a device's and the host's.
  [[nodiscard]] bool CopiesByEngine(const StridedBox& dst, const StridedBox& src) const override;
  absl::Status Fill(Stream& stream, const StridedBox& dst, float value) override;
  absl::Status Sum(Stream& stream, std::span<const SumTask> tasks) override;
  absl::Status SumsOfSquares(Stream& stream, std::span<const NormTask> tasks) override;
  [[nodiscard]] size_t MuonWorkspaceBytes(int64_t rows, int64_t cols, int64_t matrices,
                                          const MuonConfig& config) const override;
  // The first call for a shape, a number of matrices, a config and a workspace prepares its
  // products, measures tiles for those it has not met and captures a graph: it waits for the
  // stream, takes milliseconds and allocates.
  absl::Status UpdateMuon(Stream& stream, const MuonBatch& batch, void* workspace) override;
  absl::Status PrepareMuon(Stream& stream, const MuonBatch& batch, void* workspace) override;
  absl::Status UpdateAdamW(Stream& stream, std::span<const AdamWPiece> pieces) override;
  absl::Status UseChoices(std::span<const KernelChoice> choices) override;
  [[nodiscard]] std::string Tuning() const override;
  void UseTuning(absl::string_view tuning) override;

 private:
  static constexpr int kTypes = 3;

  // A graph, and what it was made for.
  struct KnownGraph {
    int64_t rows;
    int64_t cols;
    size_t matrices;
    DType weight;
    MuonConfig config;
    void* workspace;
    std::unique_ptr<MuonGraph> graph;
    [[nodiscard]] bool Fits(const MuonBatch& batch, const void* in) const;
  };

  [[nodiscard]] const KernelChoice* FindChoice(int64_t rows, int64_t cols, DType dtype) const;
  // As the choices have it.
  absl::StatusOr<MuonGraphBatch> Resolve(int64_t rows, int64_t cols, int64_t matrices, DType weight,
                                         const MuonConfig& config) const;
  absl::StatusOr<MuonGraph*> FindGraph(CUstream stream, const MuonBatch& batch, void* workspace);
  absl::Status AddSum(CUstream stream, const SumTask& task);

  const Driver& driver_;
  const ProductEngine engine_;
  mutable NewtonSchulzPrograms programs_;
  std::vector<KernelChoice> choices_;
  TileTuner tuner_;
  std::vector<KnownGraph> graphs_;

  // Each call fills these anew; they are members so that a step allocates nothing.
  std::array<std::vector<SumPass>, 2> sums_;          // without squares, and with them
  std::array<std::vector<AdamWPass>, kTypes> adamw_;  // by type of element
  std::vector<SquaresPass> squares_;
  std::vector<PassMatrix> matrices_;
  std::vector<StridedOperand> many_;
  std::unique_ptr<StridedSum> strided_;  // 20 KiB: not for the stack
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_CUDA_OPS_H_
