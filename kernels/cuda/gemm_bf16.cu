#include "kernels/cuda/gemm_variants.cuh"

namespace dmuond::kernels::cuda {
template GemmVariant FindGemm<__nv_bfloat16>(int tile_n, GemmLayout layout);
}
