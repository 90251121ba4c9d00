// Descriptions of matrices for the copy engine.
#ifndef DMUOND_KERNELS_CUDA_TENSOR_MAP_H_
#define DMUOND_KERNELS_CUDA_TENSOR_MAP_H_

#include <cuda.h>

#include <cstdint>
#include <string>

#include "kernels/cuda/gemm.h"

namespace dmuond::kernels::cuda {

// "name: rows x cols, ld …" for errors.
[[nodiscard]] std::string Describe(const char* name, const MatrixView& m);

// Boxes of box_rows x 64 elements; what lies outside the matrix reads as zero and is not written.
// false and `error` (naming the operand and its values) where the matrix cannot be described.
bool EncodeMap(const MatrixView& m, int64_t batch, GemmType type, int box_rows, const char* name,
               CUtensorMap* map, std::string* error);

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_TENSOR_MAP_H_
