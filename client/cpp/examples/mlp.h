// A network of two hidden layers with tanh and one output, and the gradient of its mean squared
// error. Weights and gradients are views of memory that somebody else owns.
#ifndef DMUOND_CLIENT_CPP_EXAMPLES_MLP_H_
#define DMUOND_CLIENT_CPP_EXAMPLES_MLP_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "table.h"

namespace example {

inline constexpr size_t kLayers = 3;

// Layer i maps sizes[i] values to sizes[i + 1].
struct Shape {
  std::array<size_t, kLayers + 1> sizes;
};

// Of each layer: a matrix [outputs, inputs], row-major, and a vector [outputs].
struct Tensors {
  std::array<std::span<float>, kLayers> matrices;
  std::array<std::span<float>, kLayers> biases;
};

// Small random matrices, zero biases; the same numbers for the same seed on every machine.
void Initialise(const Shape& shape, uint32_t seed, const Tensors& weights);

class Mlp {
 public:
  explicit Mlp(const Shape& shape);

  // Returns the mean squared error over the table; overwrites the gradients with its gradient.
  double LossAndGradients(const Table& table, const Tensors& weights, const Tensors& gradients);

 private:
  void Forward(std::span<const float> input, const Tensors& weights);
  void Backward(float error, const Tensors& weights, const Tensors& gradients);

  const Shape shape_;
  std::array<std::vector<float>, kLayers + 1> values_;  // of one row, at each layer's inputs
  std::array<std::vector<float>, kLayers + 1> deltas_;  // derivative of the loss by these
};

}  // namespace example

#endif  // DMUOND_CLIENT_CPP_EXAMPLES_MLP_H_
