#include "kernels/cuda/muon_update.h"

#include <utility>

namespace dmuond::kernels::cuda {
namespace {

size_t Align(size_t bytes) { return (bytes + 255) / 256 * 256; }

// Captures the products, so that a call costs the host one launch for all of them.
cudaError_t Capture(const NewtonSchulz& newton_schulz, cudaGraphExec_t* executable) {
  cudaStream_t stream = nullptr;
  cudaError_t result = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (result != cudaSuccess) return result;
  cudaGraph_t graph = nullptr;
  result = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  if (result == cudaSuccess) {
    const cudaError_t launched = newton_schulz.Launch(stream);
    result = cudaStreamEndCapture(stream, &graph);
    if (launched != cudaSuccess) result = launched;
  }
  if (result == cudaSuccess) result = cudaGraphInstantiate(executable, graph, 0);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  return result;
}

}  // namespace

size_t MuonUpdate::WorkspaceBytes(const PassShape& pass, const NewtonSchulzOptions& options,
                                  int64_t batch) {
  return Align(NewtonSchulz::WorkspaceBytes({pass.rows, pass.cols, batch}, options)) +
         Align(batch * NormPartials(pass) * sizeof(double)) + 3 * Align(batch * sizeof(float));
}

std::unique_ptr<MuonUpdate> MuonUpdate::Create(PassShape pass, const NewtonSchulzOptions& options,
                                               int64_t batch, void* workspace, std::string* error) {
  std::unique_ptr<MuonUpdate> update(new MuonUpdate());
  pass.x_ld = NewtonSchulz::LeadingDimension(pass.cols);
  pass.type = options.type;
  update->pass_ = pass;
  update->batch_ = batch;
  const NewtonSchulzShape shape{pass.rows, pass.cols, batch};
  auto* at =
      static_cast<std::byte*>(workspace) + Align(NewtonSchulz::WorkspaceBytes(shape, options));
  const auto take = [&](size_t bytes) {
    void* const taken = at;
    at += Align(bytes);
    return taken;
  };
  PassBuffers& buffers = update->buffers_;
  buffers.partials = static_cast<double*>(take(batch * NormPartials(pass) * sizeof(double)));
  buffers.scale = static_cast<float*>(take(batch * sizeof(float)));
  buffers.inverse_norm = static_cast<float*>(take(batch * sizeof(float)));
  buffers.inverse_norm_squared = static_cast<float*>(take(batch * sizeof(float)));
  update->newton_schulz_ = NewtonSchulz::Create(
      shape, options, {buffers.inverse_norm, buffers.inverse_norm_squared}, workspace, error);
  if (update->newton_schulz_ == nullptr) return nullptr;
  buffers.x = update->newton_schulz_->input();
  buffers.result = update->newton_schulz_->result();
  buffers.result_scale = update->newton_schulz_->result_scale();
  // Padding columns of X are never written by the cast and lie outside the tensor maps.
  if (const cudaError_t result = Capture(*update->newton_schulz_, &update->graph_);
      result != cudaSuccess) {
    *error = std::string("cannot capture Newton-Schulz: ") + cudaGetErrorString(result);
    return nullptr;
  }
  return update;
}

MuonUpdate::~MuonUpdate() {
  if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
}

cudaError_t MuonUpdate::Launch(cudaStream_t stream, std::span<const PassMatrix> matrices) const {
  cudaError_t result = LaunchMomentum(stream, pass_, matrices, buffers_);
  if (result == cudaSuccess) result = LaunchFinishNorms(stream, pass_, batch_, buffers_);
  if (result == cudaSuccess) result = LaunchCastInput(stream, pass_, matrices, buffers_);
  if (result == cudaSuccess) result = cudaGraphLaunch(graph_, stream);
  if (result == cudaSuccess) result = LaunchApply(stream, pass_, matrices, buffers_);
  return result;
}

}  // namespace dmuond::kernels::cuda
