// Runs itself with the core type that fits this processor, as dmuond starts its lanes, and one
// OpenBLAS thread per call.
#include <benchmark/benchmark.h>
#include <cblas.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "kernels/cpu/core_type.h"

int main(int argc, char** argv) {
  using dmuond::kernels::cpu::kCoreTypeVariable;
  const std::string core_type = dmuond::kernels::cpu::OpenBlasCoreType();
  if (std::getenv(kCoreTypeVariable) == nullptr && !core_type.empty()) {
    setenv(kCoreTypeVariable, core_type.c_str(), 1);
    execv("/proc/self/exe", argv);  // returns only if it fails; the header shows the core type
  }
  openblas_set_num_threads(1);
  benchmark::AddCustomContext("openblas", openblas_get_config());
  benchmark::AddCustomContext("openblas_core", openblas_get_corename());
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
