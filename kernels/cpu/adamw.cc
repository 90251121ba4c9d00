#include "kernels/cpu/adamw.h"

#include <cmath>
#include <cstring>

#include "kernels/cpu/clones.h"
#include "kernels/cpu/lerp.h"
#include "kernels/cpu/weights.h"

namespace dmuond::kernels::cpu {
namespace {

// The scalars in the precision in which torch.optim.AdamW multiplies tensors by them: computed in
// double, rounded once.
struct Factors {
  explicit Factors(const UpdateScalars& s)
      : gradient(static_cast<float>(s.gradient_factor)),
        decay(static_cast<float>(1.0 - s.learning_rate * s.weight_decay)),
        one_minus_beta1(static_cast<float>(1.0 - s.beta1)),
        beta2(static_cast<float>(s.beta2)),
        one_minus_beta2(static_cast<float>(1.0 - s.beta2)),
        root_correction2(static_cast<float>(std::sqrt(s.bias_correction2))),
        eps(static_cast<float>(s.eps)),
        step(static_cast<float>(s.learning_rate / s.bias_correction1)) {}
  float gradient, decay, one_minus_beta1, beta2, one_minus_beta2, root_correction2, eps, step;
};

DMUOND_CLONES void Update(const Factors f, const float* __restrict gradient,
                          const float* __restrict m_in, float* __restrict m_out,
                          const float* __restrict v_in, float* __restrict v_out,
                          const float* __restrict master_in, float* __restrict master_out,
                          int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float g = gradient[i] * f.gradient;
    const float m = Lerp(m_in[i], g, f.one_minus_beta1);
    const float v = v_in[i] * f.beta2 + f.one_minus_beta2 * g * g;
    const float denominator = std::sqrt(v) / f.root_correction2 + f.eps;
    m_out[i] = m;
    v_out[i] = v;
    master_out[i] = master_in[i] * f.decay - f.step * (m / denominator);
  }
}

}  // namespace

void UpdateAdamWElements(const AdamWPiece& piece, int64_t begin, int64_t end) {
  const int64_t n = end - begin;
  if (piece.scalars->active == 0) {
    const size_t bytes = static_cast<size_t>(n) * sizeof(float);
    std::memcpy(piece.m_out + begin, piece.m_in + begin, bytes);
    std::memcpy(piece.v_out + begin, piece.v_in + begin, bytes);
    std::memcpy(piece.master_out + begin, piece.master_in + begin, bytes);
  } else {
    Update(Factors(*piece.scalars), piece.gradient + begin, piece.m_in + begin, piece.m_out + begin,
           piece.v_in + begin, piece.v_out + begin, piece.master_in + begin,
           piece.master_out + begin, n);
  }
  StoreWeights(piece.weight_dtype, piece.master_out, piece.weight_out, begin, n, piece.non_finite);
}

}  // namespace dmuond::kernels::cpu
