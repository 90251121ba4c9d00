#include "kernels/cuda/muon_update.h"

#include <utility>

namespace dmuond::kernels::cuda {
namespace {

size_t Align(size_t bytes) { return (bytes + 255) / 256 * 256; }

PassShape ShapeOf(const MuonConfig& config, const NewtonSchulzProgram& program, DType weight,
                  ProductEngine engine) {
  PassShape pass;
  pass.rows = program.tall ? program.q : program.p;
  pass.cols = program.tall ? program.p : program.q;
  pass.x_ld = NewtonSchulz::LeadingDimension(pass.cols);
  pass.ema = config.momentum == MomentumForm::kEma;
  pass.nesterov = config.nesterov;
  pass.type = static_cast<WeightType>(program.dtype);
  // The Schatten-4 norm comes on top of the exact one, and is the products' business.
  pass.norm =
      program.schatten4 ? PassNorm::kExact : static_cast<PassNorm>(config.newton_schulz.norm);
  pass.eps = config.newton_schulz.eps;
  pass.weight = static_cast<WeightType>(weight);
  pass.update_scale = UpdateScale(config.scale, pass.rows, pass.cols);
  pass.normalise = NewtonSchulz::TakesNormalised(program, engine) ? program.input_scale : 0;
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

size_t MuonUpdate::WorkspaceBytes(const NewtonSchulzProgram& program, int64_t batch,
                                  ProductEngine engine) {
  size_t bytes = Align(NewtonSchulz::WorkspaceBytes(program, batch, engine)) +
                 Align(batch * PartialsOf(program) * sizeof(double)) +
                 4 * Align(batch * sizeof(float)) + Align(batch * sizeof(double));
  if (program.schatten4) {
    bytes += Align(batch * SchattenPartials(program.p) * sizeof(double)) +
             4 * Align(batch * sizeof(float));
  }
  return bytes;
}

std::unique_ptr<MuonUpdate> MuonUpdate::Create(const MuonConfig& config,
                                               const NewtonSchulzProgram& program, DType weight,
                                               int64_t batch, const PassMatrix* matrices,
                                               void* workspace, const MuonUpdateOptions& options,
                                               std::string* error) {
  std::unique_ptr<MuonUpdate> update(new MuonUpdate());
  update->pass_ = ShapeOf(config, program, weight, options.engine);
  auto* at = static_cast<std::byte*>(workspace) +
             Align(NewtonSchulz::WorkspaceBytes(program, batch, options.engine));
  const auto take = [&](size_t bytes) {
    void* const taken = at;
    at += Align(bytes);
    return taken;
  };
  PassBuffers& buffers = update->buffers_;
  buffers.matrices = matrices;
  buffers.count = batch;
  buffers.partials = static_cast<double*>(take(batch * PartialsOf(program) * sizeof(double)));
  buffers.scale = static_cast<float*>(take(batch * sizeof(float)));
  buffers.inverse_norm = static_cast<float*>(take(batch * sizeof(float)));
  buffers.inverse_norm_squared = static_cast<float*>(take(batch * sizeof(float)));
  buffers.recast = static_cast<uint32_t*>(take(batch * sizeof(uint32_t)));
  buffers.squares = static_cast<double*>(take(batch * sizeof(double)));
  NewtonSchulzNorms norms{buffers.inverse_norm, buffers.inverse_norm_squared, {}};
  if (program.schatten4) {
    const size_t partials = batch * SchattenPartials(program.p) * sizeof(double);
    norms.schatten.partials = static_cast<double*>(take(partials));
    norms.schatten.arrived = static_cast<uint32_t*>(take(batch * sizeof(uint32_t)));
    norms.schatten.inverse = static_cast<float*>(take(batch * sizeof(float)));
    norms.schatten.inverse_squared = static_cast<float*>(take(batch * sizeof(float)));
    norms.schatten.inverse_fourth = static_cast<float*>(take(batch * sizeof(float)));
    buffers.schatten_arrived = norms.schatten.arrived;
  }
  const GemmUpdate fused{matrices, buffers.inverse_norm, update->pass_.update_scale,
                         update->pass_.weight, buffers.squares};
  update->newton_schulz_ = NewtonSchulz::Create(
      program, batch, norms, workspace,
      {options.engine, options.tuner, options.separate ? nullptr : &fused}, error);
  if (update->newton_schulz_ == nullptr) return nullptr;
  buffers.x = update->newton_schulz_->input();
  buffers.result = update->newton_schulz_->result();
  buffers.result_scale = update->newton_schulz_->result_scale();
  // Padding columns of X are never written by the passes and lie outside what products read.
  return update;
}

cudaError_t MuonUpdate::Input(cudaStream_t stream) const {
  cudaError_t result = LaunchEstimate(stream, pass_, buffers_);
  if (result == cudaSuccess) result = LaunchMomentum(stream, pass_, buffers_);
  if (result == cudaSuccess) result = LaunchFinishNorms(stream, pass_, buffers_);
  if (result == cudaSuccess) result = LaunchRecast(stream, pass_, buffers_);
  return result;
}

cudaError_t MuonUpdate::Products(cudaStream_t stream) const {
  return newton_schulz_->Launch(stream);
}

cudaError_t MuonUpdate::Apply(cudaStream_t stream) const {
  cudaError_t result = cudaSuccess;
  if (!newton_schulz_->updates()) result = LaunchApply(stream, pass_, buffers_);
  return result == cudaSuccess ? LaunchTellSquares(stream, pass_, buffers_) : result;
}

}  // namespace dmuond::kernels::cuda
