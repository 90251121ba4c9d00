#include "kernels/cpu/momentum.h"

#include <algorithm>
#include <limits>

#include "kernels/cpu/clones.h"
#include "kernels/cpu/epilogue.h"
#include "kernels/cpu/lerp.h"

namespace dmuond::kernels::cpu {
namespace {

constexpr float kMax = std::numeric_limits<float>::max();

// Finite gradients near the end of fp32 must not make an infinite momentum. NaN stays NaN.
inline float Saturate(float x) {
  x = x > kMax ? kMax : x;
  return x < -kMax ? -kMax : x;
}

DMUOND_CLONES void SumForm(float factor, float momentum, float look_ahead,
                           const float* __restrict gradient, const float* __restrict in,
                           float* __restrict out, float* __restrict u, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float g = gradient[i] * factor;
    const float buffer = Saturate(momentum * in[i] + g);
    out[i] = buffer;
    u[i] = Saturate(g + look_ahead * buffer);
  }
}
DMUOND_CLONES void SumFormPlain(float factor, float momentum, const float* __restrict gradient,
                                const float* __restrict in, float* __restrict out,
                                float* __restrict u, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float buffer = Saturate(momentum * in[i] + gradient[i] * factor);
    out[i] = buffer;
    u[i] = buffer;
  }
}
DMUOND_CLONES void EmaForm(float factor, float one_minus_momentum, float look_ahead,
                           const float* __restrict gradient, const float* __restrict in,
                           float* __restrict out, float* __restrict u, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float g = gradient[i] * factor;
    const float buffer = Saturate(Lerp(in[i], g, one_minus_momentum));
    out[i] = buffer;
    u[i] = Saturate(Lerp(g, buffer, look_ahead));
  }
}

DMUOND_CLONES void ScaleWide(double scale, float* values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) values[i] = static_cast<float>(values[i] * scale);
}
DMUOND_CLONES void Divide(float divisor, float* values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) values[i] /= divisor;
}

// Two short passes over what the first-level cache holds.
constexpr int64_t kBlock = 4096;

}  // namespace

void UpdateMomentum(const MuonConfig& config, const UpdateScalars& scalars, const float* gradient,
                    const float* momentum_in, float* momentum_out, float* u, int64_t elements) {
  const auto factor = static_cast<float>(scalars.gradient_factor);
  const auto momentum = static_cast<float>(scalars.momentum);
  if (config.momentum == MomentumForm::kEma) {
    // Without look-ahead u is the buffer itself: lerp with weight one.
    EmaForm(factor, static_cast<float>(1.0 - scalars.momentum), config.nesterov ? momentum : 1.0F,
            gradient, momentum_in, momentum_out, u, elements);
  } else if (config.nesterov) {
    SumForm(factor, momentum, momentum, gradient, momentum_in, momentum_out, u, elements);
  } else {
    SumFormPlain(factor, momentum, gradient, momentum_in, momentum_out, u, elements);
  }
}

void ScaleAndRound(DType dtype, double scale, float* values, int64_t elements) {
  for (int64_t i = 0; i < elements; i += kBlock) {
    const int64_t n = std::min(kBlock, elements - i);
    ScaleWide(scale, values + i, n);
    RoundInPlace(dtype, values + i, n);
  }
}

void DivideAndRound(DType dtype, float divisor, float* values, int64_t elements) {
  for (int64_t i = 0; i < elements; i += kBlock) {
    const int64_t n = std::min(kBlock, elements - i);
    Divide(divisor, values + i, n);
    RoundInPlace(dtype, values + i, n);
  }
}

DMUOND_CLONES void ApplyDirection(float decay, float step, const float* __restrict direction,
                                  const float* __restrict master_in, float* __restrict master_out,
                                  int64_t elements) {
  for (int64_t i = 0; i < elements; ++i) {
    master_out[i] = master_in[i] * decay - step * direction[i];
  }
}

}  // namespace dmuond::kernels::cpu
