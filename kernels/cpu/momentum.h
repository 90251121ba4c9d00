// The elementwise passes of Muon around Newton-Schulz, each over a range of one matrix's elements.
// docs/maths.md section 1. Threads: any, disjoint ranges at the same time.
#ifndef DMUOND_KERNELS_CPU_MOMENTUM_H_
#define DMUOND_KERNELS_CPU_MOMENTUM_H_

#include <cstdint>

#include "kernels/ops.h"

namespace dmuond::kernels::cpu {

// momentum_out <- momentum(momentum_in, gradient), u <- what Newton-Schulz gets.
void UpdateMomentum(const MuonConfig& config, const UpdateScalars& scalars, const float* gradient,
                    const float* momentum_in, float* momentum_out, float* u, int64_t elements);

// values <- round(values * scale), the product in fp64: scale may be far outside fp32's range.
void ScaleAndRound(DType dtype, double scale, float* values, int64_t elements);
// values <- round(values / divisor), as bf16 tensors are divided.
void DivideAndRound(DType dtype, float divisor, float* values, int64_t elements);

// master_out <- master_in * decay - step * direction.
void ApplyDirection(float decay, float step, const float* direction, const float* master_in,
                    float* master_out, int64_t elements);

}  // namespace dmuond::kernels::cpu

#endif  // DMUOND_KERNELS_CPU_MOMENTUM_H_
