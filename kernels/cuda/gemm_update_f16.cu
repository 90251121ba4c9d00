#include "kernels/cuda/gemm_variants.cuh"

namespace dmuond::kernels::cuda {
template GemmVariant FindUpdateGemm<__half>(GemmTile tile, GemmLayout layout);
}
