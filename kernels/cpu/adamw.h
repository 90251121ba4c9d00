// AdamW on a range of one piece.
#ifndef DMUOND_KERNELS_CPU_ADAMW_H_
#define DMUOND_KERNELS_CPU_ADAMW_H_

#include <cstdint>

#include "kernels/ops.h"

namespace dmuond::kernels::cpu {

// Computes elements [begin, end) of the piece. Threads: any, disjoint ranges at the same time.
void UpdateAdamWElements(const AdamWPiece& piece, int64_t begin, int64_t end);

}  // namespace dmuond::kernels::cpu

#endif  // DMUOND_KERNELS_CPU_ADAMW_H_
