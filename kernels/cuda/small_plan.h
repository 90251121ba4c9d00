// Where the symmetric matrices of a small Newton-Schulz round lie in shared memory, decided on the
// host. Pure; no device. The kernel is small_kernel.cuh.
//
// A round is a Gram matrix, the symmetric products up to the next one with X, and that one. A
// matrix is its lower triangle of 64 x 64 boxes, ten for 256 rows. 28 boxes fit: two places for a
// whole matrix and one, the partial place, for eight boxes of it, which hold what a CTA needs of a
// *left* operand.
#ifndef DMUOND_KERNELS_CUDA_SMALL_PLAN_H_
#define DMUOND_KERNELS_CUDA_SMALL_PLAN_H_

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/newton_schulz.h"

namespace dmuond::kernels::cuda {

inline constexpr int64_t kSmallRowsMax = 256;
inline constexpr int kSmallPlaces = 3;
inline constexpr int kPartialPlace = 2;
inline constexpr int kPlaceBoxes = 10;
inline constexpr int kPartialBoxes = 8;
inline constexpr uint8_t kNoPlace = 255;
inline constexpr int kSmallOpsMax = 23;

// out = alpha * a * b + beta * c + beta2 * c2 + diagonal * I; letters are places. `out` may be the
// place of an operand that is not needed afterwards.
struct SmallOp {
  uint8_t a = kNoPlace;
  uint8_t b = kNoPlace;
  uint8_t c = kNoPlace;
  uint8_t c2 = kNoPlace;
  uint8_t out = kNoPlace;
  // Before `out` is written, the matrix there moves into the partial place.
  bool moves = false;
  // The last one, if it goes to device memory: its mirror images are staged in this place.
  uint8_t mirror = kNoPlace;
  float alpha = 1;
  float beta = 0;
  float beta2 = 0;
  float diagonal = 0;
};

struct SmallRound {
  // The Gram matrix lies in place 0 at first; what X is multiplied with does at last.
  std::vector<SmallOp> ops;
  Product gram;
  Product apply;
  bool applies = true;  // false: the round ends with apply.a in device memory
  size_t products = 0;  // of the program that the round takes the place of
};

// The round that begins with products[0]; `rows`: p; `applies`: with the product with X. None where
// it is no Gram matrix, where p is too large, or where the round needs more room than there is.
[[nodiscard]] std::optional<SmallRound> PlanSmallRound(std::span<const Product> products,
                                                       int64_t rows, bool applies);

// Whether rounds are expected to take less time than single products, by times measured on an H200.
// It decides no bits.
[[nodiscard]] bool SmallRoundsPay(const NewtonSchulzProgram& program, int64_t batch);

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_SMALL_PLAN_H_
