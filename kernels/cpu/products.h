// The products of a Newton-Schulz program on one matrix, by single-threaded OpenBLAS calls over
// fixed panels. A panel writes what no other panel of the product writes, so panels run in any
// order and on any threads; where they are cut is a function of the shape alone, and so are the
// bits.
//
// Values are fp32 in memory, already rounded to the program's dtype. Of a symmetric result only the
// lower triangle is computed, then mirrored.
#ifndef DMUOND_KERNELS_CPU_PRODUCTS_H_
#define DMUOND_KERNELS_CPU_PRODUCTS_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/newton_schulz.h"

namespace dmuond::kernels::cpu {

// Where one matrix's slots lie. Owns nothing. X slots are contiguous in the layout of the matrix
// that is orthogonalised (rows x cols); S slots have rows of SymmetricStride(p) elements.
struct ProductSlots {
  std::array<float*, kSlots> data{};
  [[nodiscard]] float* operator[](Slot slot) const { return data[static_cast<size_t>(slot)]; }
};

// An odd number of cache lines: rows that lie a power of two apart would share cache sets.
[[nodiscard]] int64_t SymmetricStride(int64_t p);

[[nodiscard]] int64_t Panels(const NewtonSchulzProgram& program, const Product& product);
// Threads: any, different panels of one product at the same time.
void RunPanel(const NewtonSchulzProgram& program, const Product& product, const ProductSlots& slots,
              int64_t panel);

}  // namespace dmuond::kernels::cpu

#endif  // DMUOND_KERNELS_CPU_PRODUCTS_H_
