// Newton-Schulz as a program: the list of matrix products that turns a normalised X into its
// orthogonal factor, written once for every device. docs/maths.md section 3 has the mathematics.
//
// A program is data, a pure function of (config, rows, cols). A device runs the same list over
// every matrix of a batch; how it makes a product fast is its own business. Two things make the
// list differ from the textbook:
//
//  * The first Q of a round, Z + a*I, is not stored: Z is, and a goes into the factors of the
//  products
//    that read Q. So it costs nothing, and a*I is not rounded.
//  * In fp16 every stored matrix M lies in memory as M * 2^e with a fixed e per store, chosen so
//  that
//    its largest possible entry is near 2^12: entries far below the largest one would otherwise be
//    subnormal. The factors alpha, beta and gamma of a product contain what the exponents of its
//    operands ask for.
#ifndef DMUOND_KERNELS_NEWTON_SCHULZ_H_
#define DMUOND_KERNELS_NEWTON_SCHULZ_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/ops.h"

namespace dmuond::kernels {

// Where matrices lie. X0 and X1 are p x q, X0 holds the input; S0 to S3 are p x p, symmetric.
enum class Slot : uint8_t { kX0, kX1, kS0, kS1, kS2, kS3, kNone };
inline constexpr int kSlots = 6;

enum class ProductKind : uint8_t {
  kGram,  // out = alpha * a * a^T; a in X, out in S
  // out = alpha * a * b + beta * add + gamma * add2 + diagonal * I, all in S; a and b commute
  kSymmetric,
  kApply  // out = alpha * a * b + beta * b; a in S, b and out in X
};

// One product. Accumulated in fp32, all terms added in fp32, rounded once to the program's dtype;
// unused adds are kNone.
// out is never an operand. In S, both triangles of out hold the same bits.
struct Product {
  ProductKind kind = ProductKind::kGram;
  Slot out = Slot::kNone;
  Slot a = Slot::kNone;
  Slot b = Slot::kNone;
  Slot add = Slot::kNone;
  Slot add2 = Slot::kNone;
  double alpha = 1;
  double beta = 0;
  double gamma = 0;
  double diagonal = 0;
  // How often the program's input is a factor of every term: 2 in its Gram matrix, 1 where it is
  // multiplied, 0 elsewhere. A device that casts the input without dividing by its norm multiplies
  // alpha and beta by norm^-input_power.
  int input_power = 0;
  // How often the input's Schatten-4 norm (see NewtonSchulzProgram::schatten4) is a factor of a * b
  // and of add (b in kApply): alpha is to be multiplied by norm^-alpha_power, beta by
  // norm^-beta_power.
  int alpha_power = 0;
  int beta_power = 0;
};

struct NewtonSchulzProgram {
  int64_t p = 0;  // the smaller side
  int64_t q = 0;
  // More rows than columns: X is the transpose of the matrix in memory. Devices choose the layout
  // of operands by it and move nothing.
  bool tall = false;
  DType dtype = DType::kF16;
  double input_scale = 1;  // X0 = round(u * input_scale / norm), a power of two
  // NormRule::kSchatten4: what X0 holds is still to be divided by its Schatten-4 norm, which is
  // sqrt(gram_scale * ||G||_F) for the result G of products[0]. Later products have powers of it.
  bool schatten4 = false;
  double gram_scale = 1;  // G * gram_scale = (u / norm) * (u / norm)^T, a power of two
  std::vector<Product> products;
  Slot output = Slot::kX0;
  double output_scale = 1;  // O = output * output_scale, a power of two
  int symmetric_slots = 0;  // S0 … that are used
};

// INVALID_ARGUMENT: no coefficients, a coefficient that is not finite, restarts that are not
// increasing numbers of steps after the first, coefficients under which singular values in [0, 1]
// diverge, rows or cols < 1.
absl::StatusOr<NewtonSchulzProgram> BuildNewtonSchulz(const NewtonSchulzConfig& config,
                                                      int64_t rows, int64_t cols);

// Tells for each product whether the lower triangle of its result is enough, with as many blocks
// beside the diagonal as the device likes. It is enough where the result lies in S, and every
// product that multiplies it has `reads_lower`, one entry a product. Products that only add the
// result never need more.
std::vector<bool> NeededInLowerForm(const NewtonSchulzProgram& program,
                                    const std::vector<bool>& reads_lower);

// Programs that have been asked for: one that is known costs no allocation. Threads: one at a time.
class NewtonSchulzPrograms {
 public:
  // Lives as long as this object. Errors as BuildNewtonSchulz().
  absl::StatusOr<const NewtonSchulzProgram*> Find(int64_t rows, int64_t cols,
                                                  const NewtonSchulzConfig& config);

 private:
  struct Known {
    int64_t rows;
    int64_t cols;
    NewtonSchulzConfig config;
    std::unique_ptr<const NewtonSchulzProgram> program;
  };
  std::vector<Known> known_;
};

}  // namespace dmuond::kernels

#endif  // DMUOND_KERNELS_NEWTON_SCHULZ_H_
