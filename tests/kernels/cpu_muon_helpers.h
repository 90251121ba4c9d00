// A lane's view of Muon on the CPU device in a few lines: batches of matrices with their memory.
#ifndef DMUOND_TESTS_KERNELS_CPU_MUON_HELPERS_H_
#define DMUOND_TESTS_KERNELS_CPU_MUON_HELPERS_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "kernels/cpu/cpu_device.h"
#include "tests/kernels/reference.h"

namespace dmuond::kernels::cpu {

// One matrix: state before and after. Outputs are NaN before an update, so that an element nobody
// wrote shows.
struct TestMatrix {
  TestMatrix(int64_t rows, int64_t cols, DType dtype)
      : momentum(static_cast<size_t>(rows * cols)),
        master(momentum.size()),
        momentum_out(momentum.size()),
        master_out(momentum.size()),
        weight(momentum.size() * SizeOf(dtype)) {}

  std::vector<float> gradient;
  std::vector<float> momentum;
  std::vector<float> master;
  std::vector<float> momentum_out;
  std::vector<float> master_out;
  std::vector<std::byte> weight;
  UpdateScalars scalars;
  double update_squares = -1;
};

class TestLane {
 public:
  explicit TestLane(int threads) : device_(*CpuDevice::Create(threads)) {
    stream_ = *device_->CreateStream();
  }

  Ops& ops() { return device_->ops(); }
  Stream& stream() { return *stream_; }

  // Updates the whole batch; masters and momenta move on to their new values.
  void Update(const MuonConfig& config, int64_t rows, int64_t cols,
              std::vector<TestMatrix>& matrices, DType weight_dtype = DType::kF32) {
    constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();
    std::vector<MuonMatrix> batch;
    for (TestMatrix& m : matrices) {
      m.momentum_out.assign(m.momentum.size(), kPoison);
      m.master_out.assign(m.momentum.size(), kPoison);
      m.weight.assign(m.weight.size(), std::byte{0xff});
      batch.push_back({m.gradient.data(), m.momentum.data(), m.momentum_out.data(), m.master.data(),
                       m.master_out.data(), m.weight.data(), &m.scalars, nullptr,
                       &m.update_squares});
    }
    const size_t bytes =
        ops().MuonWorkspaceBytes(rows, cols, static_cast<int64_t>(batch.size()), config);
    auto workspace = *device_->AllocateScratch(bytes);
    std::fill_n(reinterpret_cast<float*>(workspace->data()), bytes / sizeof(float), kPoison);
    const absl::Status status = ops().UpdateMuon(*stream_,
                                                 {.rows = rows,
                                                  .cols = cols,
                                                  .weight_dtype = weight_dtype,
                                                  .config = &config,
                                                  .matrices = batch},
                                                 workspace->data());
    ASSERT_TRUE(status.ok()) << status;
    for (TestMatrix& m : matrices) {
      m.momentum = m.momentum_out;
      m.master = m.master_out;
    }
  }

  // NS(gradient) as the device computes it: no momentum, no scale, a learning rate of one.
  reference::Matrix Orthogonalise(const NewtonSchulzConfig& newton_schulz,
                                  const reference::Matrix& gradient) {
    MuonConfig config;
    config.newton_schulz = newton_schulz;
    config.scale = ScaleRule::kNone;
    config.nesterov = false;
    std::vector<TestMatrix> batch(1, TestMatrix(gradient.rows, gradient.cols, DType::kF32));
    batch[0].gradient = gradient.ToFloat();
    batch[0].scalars.learning_rate = -1;
    Update(config, gradient.rows, gradient.cols, batch);
    return {gradient.rows, gradient.cols, batch[0].master};
  }

 private:
  std::unique_ptr<CpuDevice> device_;
  std::unique_ptr<Stream> stream_;
};

}  // namespace dmuond::kernels::cpu

#endif  // DMUOND_TESTS_KERNELS_CPU_MUON_HELPERS_H_
