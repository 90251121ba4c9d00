#include "kernels/cuda/muon_graph.h"

#include <cstring>

namespace dmuond::kernels::cuda {

size_t MuonGraph::WorkspaceBytes(const MuonGraphBatch& batch) {
  return MuonUpdate::WorkspaceBytes(*batch.program, batch.matrices, batch.engine);
}

std::unique_ptr<MuonGraph> MuonGraph::Create(const MuonGraphBatch& batch, void* workspace,
                                             TileTuner* tuner, std::string* error) {
  std::unique_ptr<MuonGraph> graph(new MuonGraph());
  graph->matrices_ = batch.matrices;
  const size_t bytes = graph->matrices_ * sizeof(PassMatrix);
  cudaError_t result = cudaMalloc(&graph->list_, bytes);
  for (Staging& staging : graph->staging_) {
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
  graph->update_ =
      MuonUpdate::Create(*batch.config, *batch.program, batch.weight, batch.matrices, graph->list_,
                         workspace, {batch.engine, tuner, batch.separate}, error);
  if (graph->update_ == nullptr) return nullptr;
  result = graph->Capture();
  if (result != cudaSuccess) {
    *error = std::string("cannot capture a batch of updates: ") + cudaGetErrorString(result);
    return nullptr;
  }
  return graph;
}

MuonGraph::~MuonGraph() {
  if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
  for (Staging& staging : staging_) {
    if (staging.copied != nullptr) cudaEventDestroy(staging.copied);
    cudaFreeHost(staging.list);
  }
  cudaFree(list_);
}

cudaError_t MuonGraph::Enqueue(cudaStream_t stream) const {
  cudaError_t result = update_->Input(stream);
  if (result == cudaSuccess) result = update_->Products(stream);
  if (result == cudaSuccess) result = update_->Apply(stream);
  return result;
}

cudaError_t MuonGraph::Capture() {
  cudaStream_t stream = nullptr;
  cudaError_t result = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (result != cudaSuccess) return result;
  cudaGraph_t graph = nullptr;
  result = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  if (result == cudaSuccess) {
    result = Enqueue(stream);
    const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
    if (result == cudaSuccess) result = ended;
  }
  if (result == cudaSuccess) result = cudaGraphInstantiate(&graph_, graph, 0);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  return result;
}

cudaError_t MuonGraph::Upload(cudaStream_t stream, std::span<const PassMatrix> matrices) {
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

cudaError_t MuonGraph::Launch(cudaStream_t stream, std::span<const PassMatrix> matrices) {
  const cudaError_t result = Upload(stream, matrices);
  return result == cudaSuccess ? cudaGraphLaunch(graph_, stream) : result;
}

}  // namespace dmuond::kernels::cuda
