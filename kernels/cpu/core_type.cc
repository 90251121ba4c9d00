#include "kernels/cpu/core_type.h"

#include <cstdlib>

namespace dmuond::kernels::cpu {

#if defined(__x86_64__)

std::string OpenBlasCoreType() {
  __builtin_cpu_init();
  // __builtin_cpu_supports also asks whether the system saves the wide registers.
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl");
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx512 && avx2) return "SkylakeX";
  if (avx2) return __builtin_cpu_is("amd") ? "Zen" : "Haswell";
  if (__builtin_cpu_supports("avx")) return "Sandybridge";
  return "";
}

#else

std::string OpenBlasCoreType() { return ""; }

#endif

std::string LaneCoreType() {
  const char* set = std::getenv(kCoreTypeVariable);
  return set != nullptr ? set : OpenBlasCoreType();
}

}  // namespace dmuond::kernels::cpu
