#include "kernels/cuda/gemm_variants.cuh"

namespace dmuond::kernels::cuda {
template GemmVariant FindGemm<__half>(GemmTile tile, GemmLayout layout);
}
