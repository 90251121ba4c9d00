// How far a matrix is from having orthonormal rows, or columns where it has fewer of these.
#ifndef DMUOND_KERNELS_ORTHOGONALITY_H_
#define DMUOND_KERNELS_ORTHOGONALITY_H_

#include <cstdint>

namespace dmuond::kernels {

// Up to so many rows or columns the result is exact, but for rounding in fp32.
inline constexpr int64_t kExactlyOrthogonal = 64;

// Returns ||I - O * O^T||_F / sqrt(p) of O (rows x cols, row-major), with O^T * O where rows >
// cols; p is the smaller of both. 0: all singular values are 1; a zero matrix has 1. Beyond
// kExactlyOrthogonal it is estimated with 16 random vectors of +-1, always the same ones
// (Hutchinson, 1990): right to some percent where the error is spread over many directions, and to
// a third where it lies in one. Takes 64 flops for each element, on the caller's thread.
[[nodiscard]] double OrthogonalityError(const float* o, int64_t rows, int64_t cols);

}  // namespace dmuond::kernels

#endif  // DMUOND_KERNELS_ORTHOGONALITY_H_
