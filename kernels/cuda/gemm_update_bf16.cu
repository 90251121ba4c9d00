#include "kernels/cuda/gemm_variants.cuh"

namespace dmuond::kernels::cuda {
template GemmVariant FindUpdateGemm<__nv_bfloat16>(GemmTile tile, GemmLayout layout);
}
