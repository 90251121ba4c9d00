// torch.lerp, operation by operation: the order differs on the two sides of one half.
#ifndef DMUOND_KERNELS_CPU_LERP_H_
#define DMUOND_KERNELS_CPU_LERP_H_

namespace dmuond::kernels::cpu {

[[nodiscard]] inline float Lerp(float start, float end, float weight) {
  return weight < 0.5F ? start + weight * (end - start) : end - (end - start) * (1.0F - weight);
}

}  // namespace dmuond::kernels::cpu

#endif  // DMUOND_KERNELS_CPU_LERP_H_
