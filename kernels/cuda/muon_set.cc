#include "kernels/cuda/muon_set.h"

#include <algorithm>
#include <cstring>

namespace dmuond::kernels::cuda {

size_t MuonSet::WorkspaceBytes(std::span<const MuonSetBatch> batches) {
  size_t bytes = 0;
  for (const MuonSetBatch& batch : batches) {
    bytes =
        std::max(bytes, MuonUpdate::WorkspaceBytes(*batch.program, batch.matrices, batch.engine));
  }
  return bytes;
}

std::unique_ptr<MuonSet> MuonSet::Create(std::span<const MuonSetBatch> batches, void* workspace,
                                         TileTuner* tuner, std::string* error) {
  std::unique_ptr<MuonSet> set(new MuonSet());
  for (const MuonSetBatch& batch : batches) set->matrices_ += batch.matrices;
  const size_t bytes = set->matrices_ * sizeof(PassMatrix);
  cudaError_t result = cudaMalloc(&set->list_, bytes);
  for (Staging& staging : set->staging_) {
    if (result == cudaSuccess) {
      result = cudaHostAlloc(reinterpret_cast<void**>(&staging.list), bytes, cudaHostAllocDefault);
    }
    if (result == cudaSuccess) {
      result = cudaEventCreateWithFlags(&staging.copied, cudaEventDisableTiming);
    }
  }
  if (result != cudaSuccess) {
    *error = std::string("cannot prepare a list of matrices: ") + cudaGetErrorString(result);
    return nullptr;
  }
  const PassMatrix* list = set->list_;
  for (const MuonSetBatch& batch : batches) {
    std::unique_ptr<MuonUpdate> update =
        MuonUpdate::Create(*batch.config, *batch.program, batch.weight, batch.matrices, list,
                           workspace, {batch.engine, tuner}, error);
    if (update == nullptr) return nullptr;
    set->updates_.push_back(std::move(update));
    list += batch.matrices;
  }
  result = set->Capture();
  if (result != cudaSuccess) {
    *error = std::string("cannot capture a set of updates: ") + cudaGetErrorString(result);
    return nullptr;
  }
  return set;
}

MuonSet::~MuonSet() {
  if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
  for (Staging& staging : staging_) {
    if (staging.copied != nullptr) cudaEventDestroy(staging.copied);
    cudaFreeHost(staging.list);
  }
  cudaFree(list_);
}

cudaError_t MuonSet::Capture() {
  cudaStream_t stream = nullptr;
  cudaError_t result = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (result != cudaSuccess) return result;
  cudaGraph_t graph = nullptr;
  result = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  if (result == cudaSuccess) {
    cudaError_t enqueued = cudaSuccess;
    for (const auto& update : updates_) {
      if (enqueued == cudaSuccess) enqueued = update->Input(stream);
      if (enqueued == cudaSuccess) enqueued = update->Products(stream);
      if (enqueued == cudaSuccess) enqueued = update->Apply(stream);
    }
    result = cudaStreamEndCapture(stream, &graph);
    if (enqueued != cudaSuccess) result = enqueued;
  }
  if (result == cudaSuccess) result = cudaGraphInstantiate(&graph_, graph, 0);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  return result;
}

cudaError_t MuonSet::Upload(cudaStream_t stream, std::span<const PassMatrix> matrices) {
  if (matrices.size() != matrices_) return cudaErrorInvalidValue;
  Staging& staging = staging_[next_staging_];
  next_staging_ = (next_staging_ + 1) % staging_.size();
  if (const cudaError_t result = cudaEventSynchronize(staging.copied); result != cudaSuccess) {
    return result;
  }
  const size_t bytes = matrices.size() * sizeof(PassMatrix);
  std::memcpy(staging.list, matrices.data(), bytes);
  const cudaError_t result =
      cudaMemcpyAsync(list_, staging.list, bytes, cudaMemcpyHostToDevice, stream);
  return result == cudaSuccess ? cudaEventRecord(staging.copied, stream) : result;
}

cudaError_t MuonSet::Launch(cudaStream_t stream, std::span<const PassMatrix> matrices) {
  const cudaError_t result = Upload(stream, matrices);
  return result == cudaSuccess ? cudaGraphLaunch(graph_, stream) : result;
}

}  // namespace dmuond::kernels::cuda
