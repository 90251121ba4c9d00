#include "kernels/cuda/cuda_ops.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/cuda_stream.h"
#include "kernels/cuda/library_product.h"
#include "kernels/cuda/tile_choices.h"
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

CudaOps::CudaOps(const Driver& driver, ProductEngine engine)
    : driver_(driver), engine_(engine), strided_(std::make_unique<StridedSum>()) {}

absl::Status CudaOps::SumsOfSquares(Stream& stream, std::span<const NormTask> tasks) {
  squares_.clear();
  for (const NormTask& task : tasks) {
    if (task.elements > 0) {
      squares_.push_back({task.data, task.elements, task.first_element, task.sums});
    }
  }
  return CudaStatus(LaunchSquares(CudaStream::Of(stream), squares_), "sums of squares");
}

bool CudaOps::KnownGraph::Fits(const MuonBatch& batch, const void* in) const {
  return workspace == in && rows == batch.rows && cols == batch.cols &&
         matrices == batch.matrices.size() && weight == batch.weight_dtype &&
         config == *batch.config;
}

const KernelChoice* CudaOps::FindChoice(int64_t rows, int64_t cols, DType dtype) const {
  const auto found =
      std::find_if(choices_.begin(), choices_.end(), [&](const KernelChoice& choice) {
        return choice.rows == rows && choice.cols == cols && choice.dtype == dtype;
      });
  return found == choices_.end() ? nullptr : &*found;
}

std::string CudaOps::Tuning() const { return ToText(tuner_.choices()); }

void CudaOps::UseTuning(absl::string_view tuning) { tuner_.Use(ChoicesOf(tuning)); }

absl::Status CudaOps::UseChoices(std::span<const KernelChoice> choices) {
  for (const KernelChoice& choice : choices) {
    if (choice.engine == ProductEngine::kLibrary) {
      RETURN_IF_ERROR(CheckLibrary());
    }
    if (choice.engine == ProductEngine::kOwn && engine_ == ProductEngine::kLibrary) {
      return absl::UnavailableError(absl::StrCat(
          "matrices of ", choice.rows, " x ", choice.cols,
          " are to be computed by the kernels for compute capability 9.0; this device, or its "
          "--engine, has cuBLASLt alone"));
    }
  }
  choices_.assign(choices.begin(), choices.end());
  return absl::OkStatus();
}

absl::StatusOr<MuonGraphBatch> CudaOps::Resolve(int64_t rows, int64_t cols, int64_t matrices,
                                                DType weight, const MuonConfig& config) const {
  const NewtonSchulzConfig* newton_schulz = &config.newton_schulz;
  NewtonSchulzConfig standard;
  ProductEngine engine = engine_;
  if (const KernelChoice* choice = FindChoice(rows, cols, newton_schulz->dtype)) {
    if (choice->engine != ProductEngine::kDefault) engine = choice->engine;
    if (choice->form == NewtonSchulzForm::kStandard &&
        newton_schulz->form == NewtonSchulzForm::kGram) {
      standard = *newton_schulz;
      standard.form = NewtonSchulzForm::kStandard;
      standard.restarts.clear();
      newton_schulz = &standard;
    }
  }
  ASSIGN_OR_RETURN(const NewtonSchulzProgram* const program,
                   programs_.Find(rows, cols, *newton_schulz));
  return MuonGraphBatch{&config, program, weight, matrices, engine};
}

size_t CudaOps::MuonWorkspaceBytes(int64_t rows, int64_t cols, int64_t matrices,
                                   const MuonConfig& config) const {
  const absl::StatusOr<MuonGraphBatch> batch = Resolve(rows, cols, matrices, DType::kF32, config);
  if (!batch.ok()) return 0;  // UpdateMuon says why
  return MuonGraph::WorkspaceBytes(*batch);
}

absl::StatusOr<MuonGraph*> CudaOps::FindGraph(CUstream stream, const MuonBatch& batch,
                                              void* workspace) {
  for (const KnownGraph& known : graphs_) {
    if (known.Fits(batch, workspace)) return known.graph.get();
  }
  ASSIGN_OR_RETURN(const MuonGraphBatch resolved,
                   Resolve(batch.rows, batch.cols, static_cast<int64_t>(batch.matrices.size()),
                           batch.weight_dtype, *batch.config));
  // Tiles are measured in the workspace, where an earlier update may be under way.
  RETURN_IF_ERROR(driver_.Check(driver_.stream_synchronize(stream), "cuStreamSynchronize"));
  std::string error;
  std::unique_ptr<MuonGraph> graph = MuonGraph::Create(resolved, workspace, &tuner_, &error);
  if (graph == nullptr) {
    return absl::InternalError(absl::StrCat("Newton-Schulz of ", batch.matrices.size(), " of ",
                                            batch.rows, " x ", batch.cols, ": ", error));
  }
  graphs_.push_back({batch.rows, batch.cols, batch.matrices.size(), batch.weight_dtype,
                     *batch.config, workspace, std::move(graph)});
  return graphs_.back().graph.get();
}

absl::Status CudaOps::PrepareMuon(Stream& stream, const MuonBatch& batch, void* workspace) {
  if (batch.matrices.empty()) return absl::OkStatus();
  return FindGraph(CudaStream::Of(stream), batch, workspace).status();
}

absl::Status CudaOps::UpdateMuon(Stream& stream, const MuonBatch& batch, void* workspace) {
  matrices_.clear();
  for (const MuonMatrix& m : batch.matrices) {
    if (!Aligned(m.gradient, m.momentum_in, m.momentum_out, m.master_in, m.master_out,
                 static_cast<const float*>(m.weight_out))) {
      return absl::InvalidArgumentError(absl::StrCat("matrix ", &m - batch.matrices.data(), " of ",
                                                     batch.rows, " x ", batch.cols,
                                                     " is not aligned to 16 bytes"));
    }
    matrices_.push_back({m.gradient, m.momentum_in, m.momentum_out, m.master_in, m.master_out,
                         m.weight_out, ToPass(*m.scalars), m.update_squares});
  }
  if (matrices_.empty()) return absl::OkStatus();
  if (reinterpret_cast<uintptr_t>(workspace) % 256 != 0) {
    return absl::InvalidArgumentError("workspace is not aligned to 256 bytes");
  }
  ASSIGN_OR_RETURN(MuonGraph* const graph, FindGraph(CudaStream::Of(stream), batch, workspace));
  return CudaStatus(graph->Launch(CudaStream::Of(stream), matrices_), "a batch of Muon updates");
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
    RETURN_IF_ERROR(
        CudaStatus(LaunchAdamW(CudaStream::Of(stream), type, passes), "an AdamW update"));
  }
  return absl::OkStatus();
}

}  // namespace dmuond::kernels::cuda
