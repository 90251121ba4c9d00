// Several batches of Muon updates as one CUDA graph: from reduced gradients to new weights in one
// launch. Prepared once for a workspace; the matrices' addresses and scalars may change from launch
// to launch.
// Ownership: the workspace and the matrices are the caller's. Threads: one at a time.
#ifndef DMUOND_KERNELS_CUDA_MUON_SET_H_
#define DMUOND_KERNELS_CUDA_MUON_SET_H_

#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/cuda/muon_update.h"
#include "kernels/newton_schulz.h"
#include "kernels/ops.h"

namespace dmuond::kernels::cuda {

struct MuonSetBatch {
  const MuonConfig* config = nullptr;
  const NewtonSchulzProgram* program = nullptr;
  DType weight = DType::kF32;
  int64_t matrices = 0;
  ProductEngine engine = ProductEngine::kOwn;
  bool separate = false;  // see MuonUpdateOptions
};

class MuonSet {
 public:
  // Batches of unlike sizes run beside one another, in at most so many branches of the graph: the
  // end of one batch's product leaves multiprocessors to another's. Those of one size follow one
  // another, since one may write to memory that an earlier one reads.
  static constexpr int kBranchesMax = 2;
  // Two, or one where products take so long that their ends do not count: side by side they would
  // read more from memory, since they share L2.
  static int Branches(std::span<const MuonSetBatch> batches);

  static size_t WorkspaceBytes(std::span<const MuonSetBatch> batches, int branches = 0);
  // `branches`: 0 for Branches(batches). What `batches` points to may be gone afterwards. Nothing
  // may be under way in `workspace`. For `tuner` see newton_schulz.h.
  static std::unique_ptr<MuonSet> Create(std::span<const MuonSetBatch> batches, void* workspace,
                                         TileTuner* tuner, std::string* error, int branches = 0);
  ~MuonSet();
  MuonSet(const MuonSet&) = delete;
  MuonSet& operator=(const MuonSet&) = delete;

  // `matrices`: of all batches, one after the other; addresses are multiples of 16 bytes. Waits
  // only if two earlier launches have not begun yet.
  cudaError_t Launch(cudaStream_t stream, std::span<const PassMatrix> matrices);

  // For measurements: a launch in two parts.
  cudaError_t Upload(cudaStream_t stream, std::span<const PassMatrix> matrices);
  [[nodiscard]] const MuonUpdate& update(size_t batch) const { return *updates_[batch]; }

 private:
  MuonSet() = default;
  cudaError_t Capture(std::span<const int> branch_of);
  cudaError_t Enqueue(size_t batch, cudaStream_t stream) const;

  // The list on its way to the device, where the kernels read it.
  struct Staging {
    PassMatrix* list = nullptr;  // pinned
    cudaEvent_t copied = nullptr;
  };
  std::array<Staging, 2> staging_;
  size_t next_staging_ = 0;
  PassMatrix* list_ = nullptr;
  size_t matrices_ = 0;
  std::vector<std::unique_ptr<MuonUpdate>> updates_;
  cudaGraphExec_t graph_ = nullptr;
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_MUON_SET_H_
