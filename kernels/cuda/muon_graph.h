// A batch of Muon updates as one CUDA graph: from reduced gradients to new weights in one launch.
// Prepared once for a workspace; the matrices' addresses and scalars may change from launch to
// launch.
// Ownership: the workspace and the matrices are the caller's. Threads: one at a time.
#ifndef DMUOND_KERNELS_CUDA_MUON_GRAPH_H_
#define DMUOND_KERNELS_CUDA_MUON_GRAPH_H_

#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "kernels/cuda/muon_update.h"
#include "kernels/newton_schulz.h"
#include "kernels/ops.h"

namespace dmuond::kernels::cuda {

struct MuonGraphBatch {
  const MuonConfig* config = nullptr;
  const NewtonSchulzProgram* program = nullptr;
  DType weight = DType::kF32;
  int64_t matrices = 0;
  ProductEngine engine = ProductEngine::kOwn;
  bool separate = false;  // see MuonUpdateOptions
};

class MuonGraph {
 public:
  static size_t WorkspaceBytes(const MuonGraphBatch& batch);
  // What `batch` points to may be gone afterwards. Nothing may be under way in `workspace`. For
  // `tuner` see newton_schulz.h.
  static std::unique_ptr<MuonGraph> Create(const MuonGraphBatch& batch, void* workspace,
                                           TileTuner* tuner, std::string* error);
  ~MuonGraph();
  MuonGraph(const MuonGraph&) = delete;
  MuonGraph& operator=(const MuonGraph&) = delete;

  // Addresses of `matrices` are multiples of 16 bytes. Waits only if two earlier launches have not
  // begun yet.
  cudaError_t Launch(cudaStream_t stream, std::span<const PassMatrix> matrices);

  // For measurements: what is launched.
  [[nodiscard]] const MuonUpdate& update() const { return *update_; }

 private:
  MuonGraph() = default;
  cudaError_t Capture();
  cudaError_t Enqueue(cudaStream_t stream) const;
  cudaError_t Upload(cudaStream_t stream, std::span<const PassMatrix> matrices);

  // The list on its way to the device, where the kernels read it.
  struct Staging {
    PassMatrix* list = nullptr;  // pinned
    cudaEvent_t copied = nullptr;
  };
  std::array<Staging, 2> staging_;
  size_t next_staging_ = 0;
  PassMatrix* list_ = nullptr;
  size_t matrices_ = 0;
  std::unique_ptr<MuonUpdate> update_;
  cudaGraphExec_t graph_ = nullptr;
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_MUON_GRAPH_H_
