// Which of OpenBLAS's kernels fit this processor. OpenBLAS decides by model number, which recent
// processors in virtual machines do not have in its tables: Debian 12's 0.3.21 then runs them with
// kernels from 2004, at a quarter of their speed. cpuid's feature bits know better.
#ifndef DMUOND_KERNELS_CPU_CORE_TYPE_H_
#define DMUOND_KERNELS_CPU_CORE_TYPE_H_

#include <string>

namespace dmuond::kernels::cpu {

inline constexpr char kCoreTypeVariable[] = "OPENBLAS_CORETYPE";

// What OPENBLAS_CORETYPE should say on this machine, for example "SkylakeX"; "" where OpenBLAS's
// own choice is as good as any. It is read when the library is loaded, so it must stand in a
// process's environment before that starts. Threads: any.
[[nodiscard]] std::string OpenBlasCoreType();
// What a lane that this process starts has there: what the user has set, else OpenBlasCoreType().
[[nodiscard]] std::string LaneCoreType();

}  // namespace dmuond::kernels::cpu

#endif  // DMUOND_KERNELS_CPU_CORE_TYPE_H_
