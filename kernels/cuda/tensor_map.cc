#include "kernels/cuda/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

namespace dmuond::kernels::cuda {
namespace {

PFN_cuTensorMapEncodeTiled_v12000 TensorMapEncoder() {
  static const PFN_cuTensorMapEncodeTiled_v12000 encoder = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault,
                                     &found);
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
  }();
  return encoder;
}

}  // namespace

std::string Describe(const char* name, const MatrixView& m) {
  return std::string(name) + ": " + std::to_string(m.rows) + " x " + std::to_string(m.cols) +
         ", ld " + std::to_string(m.ld) + ", batch stride " + std::to_string(m.batch_stride);
}

bool EncodeMap(const MatrixView& m, int64_t batch, GemmType type, int box_rows, const char* name,
               CUtensorMap* map, std::string* error) {
  const int64_t stride = batch > 1 ? m.batch_stride : m.rows * m.ld;
  if (m.rows < 1 || m.cols < 1 || m.ld < m.cols || m.ld % 8 != 0 || stride % 8 != 0 ||
      reinterpret_cast<uintptr_t>(m.data) % 16 != 0) {
    *error = Describe(name, m) +
             ": sizes must be positive, address a multiple of 16 bytes, ld and "
             "batch stride multiples of 8 elements, ld at least cols";
    return false;
  }
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(m.cols), static_cast<cuuint64_t>(m.rows),
                               static_cast<cuuint64_t>(batch)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(m.ld) * 2,
                                 static_cast<cuuint64_t>(stride) * 2};
  const cuuint32_t box[3] = {64, static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t element_strides[3] = {1, 1, 1};
  const CUresult result = TensorMapEncoder()(
      map,
      type == GemmType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      3, m.data, sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    *error = Describe(name, m) + ": cuTensorMapEncodeTiled returned " + std::to_string(result);
    return false;
  }
  return true;
}

}  // namespace dmuond::kernels::cuda
