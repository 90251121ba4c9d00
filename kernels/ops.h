// What a device computes. All matrices are row-major and contiguous unless a StridedBox says
// otherwise. Calls enqueue into a stream and return; pointers are device addresses that must stay
// mapped until the stream has passed the call. Nothing here allocates in the steady state of a
// step.
//
// Every result is a function of its inputs alone: not of batch size, neighbours, thread count or
// lane. Formulas: docs/maths.md.
#ifndef DMUOND_KERNELS_OPS_H_
#define DMUOND_KERNELS_OPS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/device.h"

namespace dmuond::kernels {

inline constexpr int kDimsMax = 8;
// Sums of squares are kept per block of this many consecutive elements, so that their total does
// not depend on how a tensor is cut.
inline constexpr int64_t kNormBlock = 65536;

// A box of elements in memory. Strides in elements of `dtype`, outermost dimension first.
struct StridedBox {
  std::byte* data = nullptr;
  DType dtype = DType::kF32;
  int dims = 0;
  std::array<int64_t, kDimsMax> shape{};
  std::array<int64_t, kDimsMax> strides{};
};

// dst = factor * (sum of sources), dst fp32 of any strides, sources of dst's shape and any type.
// The order is one fixed binary tree over leaves: adjacent pairs, then pairs of pairs; an odd last
// one is carried up. A source is a leaf, or a partial sum of an aligned subtree of 2^levels[i]
// leaves (the last one may hold fewer); sources come in order of their leaves and together cover
// the tree. Empty `levels`: all leaves. A source with data == nullptr is absent: its parent is its
// sibling. All absent: dst = 0. One source of fp32 with factor 1 is a copy of bits.
struct SumTask {
  StridedBox dst;
  std::span<const StridedBox> sources;
  std::span<const uint8_t> levels;
  float factor = 1.0F;
  // Not null: also the sums of squares of the result, per kNormBlock elements from dst's first one,
  // with the bits that SumsOfSquares() gives for them; dst must be contiguous, and is not read
  // again for it. Host-visible memory.
  double* squares = nullptr;
};

// Sums of squares of `elements` consecutive fp32 values. first_element is the offset of data[0] in
// the tensor that blocks are counted in; sums[i] gets the partial sum over the intersection with
// block first_element / kNormBlock + i, in fp64, in a fixed order of addition. Non-finite values
// make it so too.
struct NormTask {
  const float* data = nullptr;
  int64_t elements = 0;
  int64_t first_element = 0;
  double* sums = nullptr;  // of Device::AllocateHost, or memory that the device can write
};
[[nodiscard]] int64_t NormBlocks(int64_t first_element, int64_t elements);

// ---- Muon ----

enum class MomentumForm : uint8_t { kSum = 1, kEma = 2 };
enum class NewtonSchulzForm : uint8_t { kStandard = 1, kGram = 2 };
// How the input of Newton-Schulz is normalised; see docs/maths.md, presets.
enum class NormRule : uint8_t {
  kExact = 1,       // fp32 norm, no eps, zero gives zero; then the cast
  kPlusEps = 2,     // cast to bf16 first, x / (norm + eps)
  kClampedEps = 3,  // cast to bf16 first, x / max(norm, eps)
  // kExact, then divided by its Schatten-4 norm, the root of ||X * X^T||_F, which the first Gram
  // matrix tells. It is at most the Frobenius norm and at least the largest singular value.
  kSchatten4 = 4
};
enum class ScaleRule : uint8_t { kMatchRmsAdamW = 1, kOriginal = 2, kSpectral = 3, kNone = 4 };

// Whose matrix products, on a device that has several.
enum class ProductEngine : uint8_t {
  kDefault = 0,  // the device's own kernels where they run, else the library
  kOwn = 1,
  kLibrary = 2
};

struct NewtonSchulzConfig {
  NewtonSchulzForm form = NewtonSchulzForm::kGram;
  std::vector<std::array<double, 3>> coefficients;  // (a, b, c) per step
  std::vector<int> restarts;                        // Gram form: steps before which X is rebuilt
  // Instead of them where q <= 1.25 p: another restart costs 3 (q - p) p^2 FLOPs, next to nothing
  // there, and rounding drifts less. Those after the last step count for nothing. Square matrices,
  // where it costs nothing, then restart before every step, which is the standard form. Empty: no
  // others.
  std::vector<int> restarts_near_square;
  DType dtype = DType::kF16;  // what X, A, B, R, Z, Q, V are rounded to
  NormRule norm = NormRule::kExact;
  double eps = 0;
  bool operator==(const NewtonSchulzConfig&) const = default;
};

struct MuonConfig {
  MomentumForm momentum = MomentumForm::kSum;
  bool nesterov = true;
  ScaleRule scale = ScaleRule::kMatchRmsAdamW;
  NewtonSchulzConfig newton_schulz;
  bool operator==(const MuonConfig&) const = default;
};
// scale(m, n) of maths.md section 1.
[[nodiscard]] double UpdateScale(ScaleRule rule, int64_t rows, int64_t cols);

// What changes from step to step, per matrix or piece; in the host's memory, read before the call
// returns. Doubles, as they come from the trainer: 1 - beta2 from a beta2 in
// fp32 would already be wrong by 1e-5.
struct UpdateScalars {
  double learning_rate = 0;
  double momentum = 0;  // Muon
  double weight_decay = 0;
  double gradient_factor = 1;  // clip coefficient; multiplies the gradient first
  double beta1 = 0;            // AdamW
  double beta2 = 0;
  double eps = 0;
  double bias_correction1 = 1;  // 1 - beta1^t
  double bias_correction2 = 1;  // 1 - beta2^t
  uint32_t active = 1;          // 0: state and weights pass unchanged to the new slot
};

// How matrices of one shape and type are orthogonalised: an input of the plan, since bits depend on
// it, measured by a tuner. `form`: a Gram iteration may run in standard form, with the same
// polynomials; never the other way round.
struct KernelChoice {
  int64_t rows = 0;
  int64_t cols = 0;
  DType dtype = DType::kF16;  // of the Newton-Schulz
  ProductEngine engine = ProductEngine::kDefault;
  NewtonSchulzForm form = NewtonSchulzForm::kGram;
};

// One matrix of a batch. `in` and `out` slots are different memory.
struct MuonMatrix {
  const float* gradient = nullptr;
  const float* momentum_in = nullptr;
  float* momentum_out = nullptr;
  const float* master_in = nullptr;
  float* master_out = nullptr;
  void* weight_out = nullptr;  // the new weight in weight_dtype
  const UpdateScalars* scalars = nullptr;
  // Not null: set to 1, and never to 0, where a new weight is infinite or NaN, as it is in
  // weight_dtype. Host-visible memory. The CPU looks; a CUDA device does not, and leaves it, but
  // update_squares tells of such an update.
  uint32_t* non_finite = nullptr;
  // Not null: set to the sum of squares of scale(m, n) * O, the update before the learning rate, or
  // to 0 where the matrix is not active or has no direction. Not finite where the update is not.
  // Host-visible memory. A figure to look at: GPUs add in no fixed order, so that last bits differ.
  double* update_squares = nullptr;
};
struct MuonBatch {
  int64_t rows = 0;
  int64_t cols = 0;
  DType weight_dtype = DType::kF32;
  const MuonConfig* config = nullptr;
  std::span<const MuonMatrix> matrices;
};

// One AdamW piece of consecutive elements. m, v and master in fp32.
struct AdamWPiece {
  int64_t elements = 0;
  DType weight_dtype = DType::kF32;
  const float* gradient = nullptr;
  const float* m_in = nullptr;
  float* m_out = nullptr;
  const float* v_in = nullptr;
  float* v_out = nullptr;
  const float* master_in = nullptr;
  float* master_out = nullptr;
  void* weight_out = nullptr;
  const UpdateScalars* scalars = nullptr;
  uint32_t* non_finite = nullptr;  // as MuonMatrix's
};

class Ops {
 public:
  virtual ~Ops() = default;

  // Copies (and converts, where dtypes differ) a box; shapes equal.
  virtual absl::Status Copy(Stream& stream, const StridedBox& dst, const StridedBox& src) = 0;
  // Whether Copy() of these boxes takes no multiprocessor from whoever computes on the device: a
  // copy engine does it. A device that has none to take says true.
  [[nodiscard]] virtual bool CopiesByEngine(const StridedBox& dst, const StridedBox& src) const;
  virtual absl::Status Fill(Stream& stream, const StridedBox& dst, float value) = 0;
  virtual absl::Status Sum(Stream& stream, std::span<const SumTask> tasks) = 0;
  virtual absl::Status SumsOfSquares(Stream& stream, std::span<const NormTask> tasks) = 0;

  // From reduced gradients to new state and weights, a batch of matrices of one shape. `workspace`
  // has at least MuonWorkspaceBytes(...) bytes.
  virtual size_t MuonWorkspaceBytes(int64_t rows, int64_t cols, int64_t matrices,
                                    const MuonConfig& config) const = 0;
  virtual absl::Status UpdateMuon(Stream& stream, const MuonBatch& batch, void* workspace) = 0;
  // Makes what such an update needs once, so that UpdateMuon() allocates nothing and waits for
  // nothing. Only the number of matrices counts; the workspace's contents are lost. Without it the
  // first update does this.
  virtual absl::Status PrepareMuon(Stream& stream, const MuonBatch& batch, void* workspace);
  virtual absl::Status UpdateAdamW(Stream& stream, std::span<const AdamWPiece> pieces) = 0;

  // Choices for shapes, before the first workspace is asked for; other shapes keep the default.
  // UNAVAILABLE where an engine is not there. A device without engines has nothing to choose.
  virtual absl::Status UseChoices(std::span<const KernelChoice> choices);

  // The fastest way of each computation that this process has measured on its device, as text in a
  // form that UseTuning() reads. Empty: it has measured none. No bit of a result depends on it.
  [[nodiscard]] virtual std::string Tuning() const { return ""; }
  // Takes another process's Tuning() of the same device over, so that PrepareMuon() need not
  // measure anew. Call it before the first PrepareMuon(). A text that cannot be read counts as
  // empty.
  virtual void UseTuning(absl::string_view /*tuning*/) {}
};

}  // namespace dmuond::kernels

#endif  // DMUOND_KERNELS_OPS_H_
