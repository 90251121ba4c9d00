#include "mlp.h"

#include <algorithm>
#include <cmath>

namespace example {

void Initialise(const Shape& shape, uint32_t seed, const Tensors& weights) {
  uint32_t state = seed;
  for (size_t layer = 0; layer < kLayers; ++layer) {
    const float scale = 1.0F / std::sqrt(static_cast<float>(shape.sizes[layer]));
    for (float& weight : weights.matrices[layer]) {
      state = state * 1664525U + 1013904223U;  // Numerical Recipes' generator
      weight = scale * (static_cast<float>(state >> 8) / static_cast<float>(1U << 23) - 1);
    }
    std::fill(weights.biases[layer].begin(), weights.biases[layer].end(), 0.0F);
  }
}

Mlp::Mlp(const Shape& shape) : shape_(shape) {
  for (size_t i = 0; i <= kLayers; ++i) {
    values_[i].resize(shape.sizes[i]);
    deltas_[i].resize(shape.sizes[i]);
  }
}

void Mlp::Forward(std::span<const float> input, const Tensors& weights) {
  std::copy(input.begin(), input.end(), values_[0].begin());
  for (size_t layer = 0; layer < kLayers; ++layer) {
    const std::vector<float>& in = values_[layer];
    for (size_t o = 0; o < shape_.sizes[layer + 1]; ++o) {
      float sum = weights.biases[layer][o];
      for (size_t i = 0; i < in.size(); ++i) {
        sum += weights.matrices[layer][(o * in.size()) + i] * in[i];
      }
      values_[layer + 1][o] = layer + 1 < kLayers ? std::tanh(sum) : sum;
    }
  }
}

void Mlp::Backward(float error, const Tensors& weights, const Tensors& gradients) {
  deltas_[kLayers][0] = error;
  for (size_t layer = kLayers; layer-- > 0;) {
    const std::vector<float>& in = values_[layer];
    std::vector<float>& delta_in = deltas_[layer];
    std::fill(delta_in.begin(), delta_in.end(), 0.0F);
    for (size_t o = 0; o < shape_.sizes[layer + 1]; ++o) {
      const float delta = deltas_[layer + 1][o];
      gradients.biases[layer][o] += delta;
      for (size_t i = 0; i < in.size(); ++i) {
        gradients.matrices[layer][(o * in.size()) + i] += delta * in[i];
        delta_in[i] += delta * weights.matrices[layer][(o * in.size()) + i];
      }
    }
    // Through tanh, whose derivative is 1 - tanh². The first layer's inputs have none.
    for (size_t i = 0; i < in.size(); ++i) delta_in[i] *= 1 - (in[i] * in[i]);
  }
}

double Mlp::LossAndGradients(const Table& table, const Tensors& weights, const Tensors& gradients) {
  for (size_t layer = 0; layer < kLayers; ++layer) {
    std::fill(gradients.matrices[layer].begin(), gradients.matrices[layer].end(), 0.0F);
    std::fill(gradients.biases[layer].begin(), gradients.biases[layer].end(), 0.0F);
  }
  double squares = 0;
  const auto rows = static_cast<float>(table.rows());
  for (size_t row = 0; row < table.rows(); ++row) {
    Forward({table.inputs.data() + (row * table.columns), table.columns}, weights);
    const float error = values_[kLayers][0] - table.targets[row];
    squares += static_cast<double>(error) * error;
    Backward(2 * error / rows, weights, gradients);
  }
  return squares / static_cast<double>(table.rows());
}

}  // namespace example
