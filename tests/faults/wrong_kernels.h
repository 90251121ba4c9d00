// Kernels that tests have do what wrong programs do, in the current context.
#ifndef DMUOND_TESTS_FAULTS_WRONG_KERNELS_H_
#define DMUOND_TESTS_FAULTS_WRONG_KERNELS_H_

#include <cuda.h>

#include <cstdint>

#include "tests/fake_cuda/contract_kernels.h"

namespace dmuond::testing {

inline CUresult LaunchContractKernel(const char* kernel, unsigned blocks, CUstream stream,
                                     void** parameters) {
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  CUresult result = cuModuleLoadData(&module, kContractKernels);
  if (result == CUDA_SUCCESS) result = cuModuleGetFunction(&function, module, kernel);
  if (result != CUDA_SUCCESS) return result;
  return cuLaunchKernel(function, blocks, 1, 1, 1024, 1, 1, 0, stream, parameters, nullptr);
}

// An illegal access, which the context does not survive.
inline CUresult StoreNowhere(CUstream stream) {
  uint64_t address = 8;
  uint64_t value = 1;
  void* parameters[] = {&address, &value};
  return LaunchContractKernel("contract_store", 1, stream, parameters);
}

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_FAULTS_WRONG_KERNELS_H_
