// main() of tests and benchmarks that multiply matrices: starts itself again with the core type
// that fits this processor, as dmuond does for its lanes, then runs GoogleTest.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "kernels/cpu/core_type.h"

int main(int argc, char** argv) {
  using dmuond::kernels::cpu::kCoreTypeVariable;
  const std::string core_type = dmuond::kernels::cpu::OpenBlasCoreType();
  if (std::getenv(kCoreTypeVariable) == nullptr && !core_type.empty()) {
    setenv(kCoreTypeVariable, core_type.c_str(), 1);
    setenv("OPENBLAS_NUM_THREADS", "1", 1);
    execv("/proc/self/exe", argv);  // returns only if it fails; then the test is merely slow
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
