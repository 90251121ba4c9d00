// From reduced gradients to new momentum, masters and weights: one call for a batch of matrices of
// one shape. Prepared once for a workspace; the matrices' addresses may change from call to call.
// Ownership: the workspace and the matrices are the caller's. Threads: one at a time.
#ifndef DMUOND_KERNELS_CUDA_MUON_UPDATE_H_
#define DMUOND_KERNELS_CUDA_MUON_UPDATE_H_

#include <cuda_runtime.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "kernels/cuda/muon_passes.h"
#include "kernels/cuda/newton_schulz.h"
#include "kernels/ops.h"

namespace dmuond::kernels::cuda {

class MuonUpdate {
 public:
  static size_t WorkspaceBytes(const NewtonSchulzProgram& program, int64_t batch);
  // `program` is that of config.newton_schulz; both may be gone afterwards. `tuner`: see
  // newton_schulz.h.
  static std::unique_ptr<MuonUpdate> Create(const MuonConfig& config,
                                            const NewtonSchulzProgram& program, DType weight,
                                            int64_t batch, void* workspace, TileTuner* tuner,
                                            std::string* error);
  ~MuonUpdate();
  MuonUpdate(const MuonUpdate&) = delete;
  MuonUpdate& operator=(const MuonUpdate&) = delete;

  // REQUIRES: matrices.size() == batch; addresses are multiples of 16 bytes.
  cudaError_t Launch(cudaStream_t stream, std::span<const PassMatrix> matrices) const;

  // The parts of Launch, for measurements.
  [[nodiscard]] const NewtonSchulz& newton_schulz() const { return *newton_schulz_; }
  [[nodiscard]] const PassShape& pass() const { return pass_; }
  [[nodiscard]] const PassBuffers& buffers() const { return buffers_; }

 private:
  MuonUpdate() = default;
  PassShape pass_;
  PassBuffers buffers_;
  int64_t batch_ = 0;
  std::unique_ptr<NewtonSchulz> newton_schulz_;
  cudaGraphExec_t graph_ = nullptr;  // Newton-Schulz
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_MUON_UPDATE_H_
