// The last pass over an updated parameter: new masters into weights of the trainers' type.
#ifndef DMUOND_KERNELS_CPU_WEIGHTS_H_
#define DMUOND_KERNELS_CPU_WEIGHTS_H_

#include <cstddef>
#include <cstdint>

#include "kernels/device.h"

namespace dmuond::kernels::cpu {

[[nodiscard]] bool AllFinite(DType dtype, const void* values, size_t elements);

// weights[i] = masters[i] rounded to `dtype`, from element `begin` on; null: they stay masters
// alone. Sets *non_finite, where it is not null, to 1 where one of them is infinite or NaN, as they
// are after rounding. Several threads may do so for one flag.
void StoreWeights(DType dtype, const float* masters, void* weights, int64_t begin, int64_t elements,
                  uint32_t* non_finite);

}  // namespace dmuond::kernels::cpu

#endif  // DMUOND_KERNELS_CPU_WEIGHTS_H_
