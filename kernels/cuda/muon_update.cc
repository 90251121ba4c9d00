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

PassShape ShapeOf(const MuonConfig& config, const NewtonSchulzProgram& program, DType weight) {
  PassShape pass;
  pass.rows = program.tall ? program.q : program.p;
  pass.cols = program.tall ? program.p : program.q;
  pass.x_ld = NewtonSchulz::LeadingDimension(pass.cols);
  pass.ema = config.momentum == MomentumForm::kEma;
  pass.nesterov = config.nesterov;
  pass.type = static_cast<WeightType>(program.dtype);
  pass.norm = static_cast<PassNorm>(config.newton_schulz.norm);
  pass.eps = config.newton_schulz.eps;
  pass.weight = static_cast<WeightType>(weight);
  pass.update_scale = UpdateScale(config.scale, pass.rows, pass.cols);
  return pass;
}
static_assert(static_cast<int>(WeightType::kF32) == static_cast<int>(DType::kF32) &&
              static_cast<int>(WeightType::kBF16) == static_cast<int>(DType::kBF16) &&
              static_cast<int>(WeightType::kF16) == static_cast<int>(DType::kF16));
static_assert(static_cast<int>(PassNorm::kExact) == static_cast<int>(NormRule::kExact) &&
              static_cast<int>(PassNorm::kPlusEps) == static_cast<int>(NormRule::kPlusEps) &&
              static_cast<int>(PassNorm::kClampedEps) == static_cast<int>(NormRule::kClampedEps));

// Partial sums of a matrix; rows and cols are all that they depend on.
int64_t PartialsOf(const NewtonSchulzProgram& program) {
  PassShape shape;
  shape.rows = program.p;
  shape.cols = program.q;
  return NormPartials(shape);
}

}  // namespace

size_t MuonUpdate::WorkspaceBytes(const NewtonSchulzProgram& program, int64_t batch) {
  return Align(NewtonSchulz::WorkspaceBytes(program, batch)) +
         Align(batch * PartialsOf(program) * sizeof(double)) + 3 * Align(batch * sizeof(float));
}

std::unique_ptr<MuonUpdate> MuonUpdate::Create(const MuonConfig& config,
                                               const NewtonSchulzProgram& program, DType weight,
                                               int64_t batch, void* workspace, TileTuner* tuner,
                                               std::string* error) {
  std::unique_ptr<MuonUpdate> update(new MuonUpdate());
  update->pass_ = ShapeOf(config, program, weight);
  update->batch_ = batch;
  auto* at =
      static_cast<std::byte*>(workspace) + Align(NewtonSchulz::WorkspaceBytes(program, batch));
  const auto take = [&](size_t bytes) {
    void* const taken = at;
    at += Align(bytes);
    return taken;
  };
  PassBuffers& buffers = update->buffers_;
  buffers.partials = static_cast<double*>(take(batch * PartialsOf(program) * sizeof(double)));
  buffers.scale = static_cast<float*>(take(batch * sizeof(float)));
  buffers.inverse_norm = static_cast<float*>(take(batch * sizeof(float)));
  buffers.inverse_norm_squared = static_cast<float*>(take(batch * sizeof(float)));
  update->newton_schulz_ =
      NewtonSchulz::Create(program, batch, {buffers.inverse_norm, buffers.inverse_norm_squared},
                           workspace, tuner, error);
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
