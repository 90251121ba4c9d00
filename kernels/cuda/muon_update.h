// From reduced gradients to new momentum, masters and weights, for a batch of matrices of one
// shape: three parts that are enqueued one after the other, also into a graph. Prepared once for a
// workspace and a list of matrices in device memory, whose contents may change from run to run.
// Ownership: workspace, list and matrices are the caller's. Threads: one at a time.
#ifndef DMUOND_KERNELS_CUDA_MUON_UPDATE_H_
#define DMUOND_KERNELS_CUDA_MUON_UPDATE_H_

#include <cuda_runtime.h>

#include <cstddef>
#include <memory>
#include <string>

#include "kernels/cuda/muon_passes.h"
#include "kernels/cuda/newton_schulz.h"
#include "kernels/ops.h"

namespace dmuond::kernels::cuda {

struct MuonUpdateOptions {
  ProductEngine engine = ProductEngine::kOwn;
  TileTuner* tuner = nullptr;  // see newton_schulz.h
  // Masters and weights in a pass of their own, though the last product could do it. Same bits.
  bool separate = false;
};

class MuonUpdate {
 public:
  static size_t WorkspaceBytes(const NewtonSchulzProgram& program, int64_t batch,
                               ProductEngine engine);
  // `program` is that of config.newton_schulz; both may be gone afterwards. `matrices`: `batch` of
  // them, in device memory; addresses in it are multiples of 16 bytes.
  static std::unique_ptr<MuonUpdate> Create(const MuonConfig& config,
                                            const NewtonSchulzProgram& program, DType weight,
                                            int64_t batch, const PassMatrix* matrices,
                                            void* workspace, const MuonUpdateOptions& options,
                                            std::string* error);

  // Momentum, norms, X.
  cudaError_t Input(cudaStream_t stream) const;
  cudaError_t Products(cudaStream_t stream) const;
  // Masters and weights, where the products have not done it, and what is told of the update.
  cudaError_t Apply(cudaStream_t stream) const;

  [[nodiscard]] const NewtonSchulz& newton_schulz() const { return *newton_schulz_; }
  [[nodiscard]] const PassShape& pass() const { return pass_; }
  [[nodiscard]] const PassBuffers& buffers() const { return buffers_; }

 private:
  MuonUpdate() = default;
  PassShape pass_;
  PassBuffers buffers_;
  std::unique_ptr<NewtonSchulz> newton_schulz_;
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_MUON_UPDATE_H_
