#include "kernels/cuda/cuda_ops.h"

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/cuda_stream.h"
#include "kernels/task_checks.h"

namespace dmuond::kernels::cuda {
namespace {

// The order of the arrays by type.
constexpr std::array<WeightType, 3> kElementTypes = {WeightType::kF32, WeightType::kBF16,
                                                     WeightType::kF16};
size_t IndexOf(DType dtype) { return static_cast<size_t>(dtype) - 1; }

template <typename... Pointers>
bool Aligned(const Pointers*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) | ...) % 16) == 0;
}

PassScalars ToPass(const UpdateScalars& s) {
  return {.learning_rate = s.learning_rate,
          .momentum = s.momentum,
          .weight_decay = s.weight_decay,
          .gradient_factor = s.gradient_factor,
          .beta1 = s.beta1,
          .beta2 = s.beta2,
          .eps = s.eps,
          .bias_correction1 = s.bias_correction1,
          .bias_correction2 = s.bias_correction2,
          .active = s.active};
}

}  // namespace

CudaOps::CudaOps(const Driver& driver)
    : driver_(driver), strided_(std::make_unique<StridedSum>()) {}

absl::Status CudaOps::SumsOfSquares(Stream& stream, std::span<const NormTask> tasks) {
  squares_.clear();
  for (const NormTask& task : tasks) {
    if (task.elements > 0) {
      squares_.push_back({task.data, task.elements, task.first_element, task.sums});
    }
  }
  return CudaStatus(LaunchSquares(CudaStream::Of(stream), squares_), "sums of squares");
}

size_t CudaOps::MuonWorkspaceBytes(int64_t rows, int64_t cols, int64_t matrices,
                                   const MuonConfig& config) const {
  const absl::StatusOr<const NewtonSchulzProgram*> program =
      programs_.Find(rows, cols, config.newton_schulz);
  if (!program.ok()) return 0;  // UpdateMuon says why
  return MuonUpdate::WorkspaceBytes(**program, matrices);
}

absl::StatusOr<const MuonUpdate*> CudaOps::FindUpdate(const MuonBatch& batch, void* workspace) {
  for (const KnownUpdate& known : updates_) {
    if (known.rows == batch.rows && known.cols == batch.cols &&
        known.matrices == batch.matrices.size() && known.weight == batch.weight_dtype &&
        known.workspace == workspace && known.config == *batch.config) {
      return known.update.get();
    }
  }
  const absl::StatusOr<const NewtonSchulzProgram*> program =
      programs_.Find(batch.rows, batch.cols, batch.config->newton_schulz);
  if (!program.ok()) return program.status();
  std::string error;
  std::unique_ptr<MuonUpdate> update =
      MuonUpdate::Create(*batch.config, **program, batch.weight_dtype,
                         static_cast<int64_t>(batch.matrices.size()), workspace, &tuner_, &error);
  if (update == nullptr) {
    return absl::InternalError(absl::StrCat("Newton-Schulz of ", batch.matrices.size(),
                                            " matrices of ", batch.rows, " x ", batch.cols, ": ",
                                            error));
  }
  updates_.push_back({batch.rows, batch.cols, batch.matrices.size(), batch.weight_dtype,
                      *batch.config, workspace, std::move(update)});
  return updates_.back().update.get();
}

absl::Status CudaOps::UpdateMuon(Stream& stream, const MuonBatch& batch, void* workspace) {
  if (batch.matrices.empty()) return absl::OkStatus();
  if (reinterpret_cast<uintptr_t>(workspace) % 256 != 0) {
    return absl::InvalidArgumentError("workspace is not aligned to 256 bytes");
  }
  matrices_.clear();
  for (const MuonMatrix& m : batch.matrices) {
    if (!Aligned(m.gradient, m.momentum_in, m.momentum_out, m.master_in, m.master_out,
                 static_cast<const float*>(m.weight_out))) {
      return absl::InvalidArgumentError(absl::StrCat("matrix ", matrices_.size(), " of ",
                                                     batch.rows, " x ", batch.cols,
                                                     " is not aligned to 16 bytes"));
    }
    matrices_.push_back({m.gradient, m.momentum_in, m.momentum_out, m.master_in, m.master_out,
                         m.weight_out, ToPass(*m.scalars)});
  }
  const absl::StatusOr<const MuonUpdate*> update = FindUpdate(batch, workspace);
  if (!update.ok()) return update.status();
  return CudaStatus((*update)->Launch(CudaStream::Of(stream), matrices_), "a Muon update");
}

absl::Status CudaOps::UpdateAdamW(Stream& stream, std::span<const AdamWPiece> pieces) {
  for (std::vector<AdamWPass>& passes : adamw_) passes.clear();
  for (size_t i = 0; i < pieces.size(); ++i) {
    const AdamWPiece& p = pieces[i];
    if (p.elements == 0) continue;
    if (!Aligned(p.gradient, p.m_in, p.m_out, p.v_in, p.v_out, p.master_in, p.master_out,
                 static_cast<const float*>(p.weight_out))) {
      return absl::InvalidArgumentError(absl::StrCat("AdamW piece ", i, " of ", p.elements,
                                                     " elements is not aligned to 16 bytes"));
    }
    adamw_[IndexOf(p.weight_dtype)].push_back({p.elements, p.gradient, p.m_in, p.m_out, p.v_in,
                                               p.v_out, p.master_in, p.master_out, p.weight_out,
                                               ToPass(*p.scalars)});
  }
  for (const WeightType type : kElementTypes) {
    const std::vector<AdamWPass>& passes = adamw_[IndexOf(static_cast<DType>(type))];
    if (passes.empty()) continue;
    const absl::Status status =
        CudaStatus(LaunchAdamW(CudaStream::Of(stream), type, passes), "an AdamW update");
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace dmuond::kernels::cuda
