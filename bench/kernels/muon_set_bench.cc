// The Muon update of a whole model's matrices (49.5 M parameters: 7 layers of width 768) beside the
// same matrix products called directly through OpenBLAS, by the same number of threads:
//
//   of_plain  update / (each product of the polynomial as one full sgemm)
//   of_half   update / (the products that the update really makes: symmetric results by ssyrk or by
//             sgemm on the lower triangle), without anything between them
//   cpu_…     the same of processor time, for machines that do other things meanwhile
#include <benchmark/benchmark.h>
#include <cblas.h>
#include <time.h>

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/products.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/presets.h"

namespace dmuond::kernels {
namespace {

struct Shape {
  int64_t rows;
  int64_t cols;
  int count;
};
// Per layer: q, k, v, o and the two matrices of the MLP.
const std::vector<Shape> kModel = {{768, 768, 28}, {3072, 768, 7}, {768, 3072, 7}};

struct Times {
  double wall_s = std::numeric_limits<double>::max();
  double cpu_s = std::numeric_limits<double>::max();  // of all threads

  // Keeps the smallest of each: other programs only ever make them larger.
  template <typename Work>
  double Add(Work&& work) {
    const double wall_begin = Clock(CLOCK_MONOTONIC);
    const double cpu_begin = Clock(CLOCK_PROCESS_CPUTIME_ID);
    work();
    const double wall = Clock(CLOCK_MONOTONIC) - wall_begin;
    cpu_s = std::min(cpu_s, Clock(CLOCK_PROCESS_CPUTIME_ID) - cpu_begin);
    wall_s = std::min(wall_s, wall);
    return wall;
  }

 private:
  static double Clock(clockid_t clock) {
    timespec now{};
    clock_gettime(clock, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
  }
};

// The matrices of one shape with all their state, as a lane has it.
class Matrices {
 public:
  Matrices(const Shape& shape, cpu::CpuDevice& device) : shape_(shape) {
    const auto elements = static_cast<size_t>(shape.rows * shape.cols);
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    const auto floats = [&] {
      memory_.push_back(*device.AllocateScratch(elements * sizeof(float)));
      auto* data = reinterpret_cast<float*>(memory_.back()->data());
      for (size_t i = 0; i < elements; ++i) data[i] = normal(random);
      return data;
    };
    scalars_.learning_rate = 1e-3;
    scalars_.momentum = 0.95;
    for (int i = 0; i < shape.count; ++i) {
      batch_.push_back({floats(), floats(), floats(), floats(), floats(), floats(), &scalars_});
    }
  }

  void Update(Ops& ops, Stream& stream, const MuonConfig& config, void* workspace) const {
    const absl::Status status = ops.UpdateMuon(stream,
                                               {.rows = shape_.rows,
                                                .cols = shape_.cols,
                                                .weight_dtype = DType::kBF16,
                                                .config = &config,
                                                .matrices = batch_},
                                               workspace);
    if (!status.ok()) std::abort();
  }

  [[nodiscard]] const Shape& shape() const { return shape_; }

 private:
  Shape shape_;
  UpdateScalars scalars_;
  std::vector<std::unique_ptr<Mapping>> memory_;
  std::vector<MuonMatrix> batch_;
};

// Symmetric result, lower triangle only: ssyrk where the factors are the same, else column panels.
void HalfProduct(int size, const float* a, const float* b, float* out) {
  if (a == b) {
    cblas_ssyrk(CblasRowMajor, CblasLower, CblasNoTrans, size, size, 1, a, size, 0, out, size);
    return;
  }
  constexpr int kPanel = 192;
  const auto p = static_cast<ptrdiff_t>(size);
  for (int col = 0; col < size; col += kPanel) {
    const int width = std::min(kPanel, size - col);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, size - col, width, size, 1, a + col * p,
                size, b + col, size, 0, out + col * p + col, size);
  }
}

void DirectProduct(const NewtonSchulzProgram& program, const Product& product,
                   const std::vector<float*>& slots, bool half) {
  const auto p = static_cast<int>(program.p);
  const auto q = static_cast<int>(program.q);
  const auto at = [&](Slot slot) { return slots[static_cast<size_t>(slot)]; };
  const auto trans = program.tall ? CblasTrans : CblasNoTrans;
  const auto other = program.tall ? CblasNoTrans : CblasTrans;
  const int ldx = program.tall ? p : q;
  if (product.kind == ProductKind::kGram && half) {
    cblas_ssyrk(CblasRowMajor, CblasLower, trans, p, q, 1, at(product.a), ldx, 0, at(product.out),
                p);
  } else if (product.kind == ProductKind::kGram) {
    cblas_sgemm(CblasRowMajor, trans, other, p, p, q, 1, at(product.a), ldx, at(product.a), ldx, 0,
                at(product.out), p);
  } else if (product.kind == ProductKind::kSymmetric && half) {
    HalfProduct(p, at(product.a), at(product.b), at(product.out));
  } else if (product.kind == ProductKind::kSymmetric) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, p, p, p, 1, at(product.a), p,
                at(product.b), p, 0, at(product.out), p);
  } else if (program.tall) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, q, p, p, 1, at(product.b), p,
                at(product.a), p, 0, at(product.out), p);
  } else {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, p, q, p, 1, at(product.a), p,
                at(product.b), q, 0, at(product.out), q);
  }
}

// The products of every matrix of the model, matrices shared out among the threads.
class Direct {
 public:
  Direct(const NewtonSchulzConfig& config, int threads, cpu::CpuDevice& device) : pool_(threads) {
    for (const Shape& shape : kModel) {
      programs_.push_back(*BuildNewtonSchulz(config, shape.rows, shape.cols));
    }
    std::mt19937 random(2);
    std::uniform_real_distribution<float> uniform(-1e-3F, 1e-3F);
    constexpr size_t kElementsMax = size_t{768} * 3072;
    slots_.resize(static_cast<size_t>(threads));
    for (auto& slots : slots_) {
      for (int i = 0; i < kSlots; ++i) {
        // The device's memory, as the update has it: its pages are large.
        memory_.push_back(*device.AllocateScratch(kElementsMax * sizeof(float)));
        slots.push_back(reinterpret_cast<float*>(memory_.back()->data()));
        for (size_t k = 0; k < kElementsMax; ++k) slots.back()[k] = uniform(random);
      }
    }
  }

  void Run(bool half) {
    for (size_t i = 0; i < kModel.size(); ++i) {
      pool_.ParallelFor(kModel[i].count, [&](int64_t, int worker) {
        const std::vector<float*>& slots = slots_[static_cast<size_t>(worker)];
        for (Product product : programs_[i].products) {
          // Into memory that nobody reads: operands keep their values, subnormal ones would be
          // slow.
          product.out = product.kind == ProductKind::kApply ? Slot::kX1 : Slot::kS3;
          if (product.b == Slot::kX1) product.b = Slot::kX0;
          if (product.a == Slot::kX1) product.a = Slot::kX0;
          if (product.a == Slot::kS3) product.a = Slot::kS2;
          if (product.b == Slot::kS3)
            product.b = product.kind == ProductKind::kSymmetric && product.a == Slot::kS2
                            ? Slot::kS1
                            : Slot::kS2;
          DirectProduct(programs_[i], product, slots, half);
        }
      });
    }
  }

 private:
  cpu::ThreadPool pool_;
  std::vector<NewtonSchulzProgram> programs_;
  std::vector<std::unique_ptr<Mapping>> memory_;
  std::vector<std::vector<float*>> slots_;  // of each thread
};

void BM_MuonSet(benchmark::State& state, const std::string& preset, int threads) {
  const MuonConfig config = *FindPreset(preset);
  auto device = *cpu::CpuDevice::Create(threads);
  auto stream = *device->CreateStream();
  std::vector<Matrices> model;
  size_t workspace_bytes = 0;
  for (const Shape& shape : kModel) {
    model.emplace_back(shape, *device);
    workspace_bytes = std::max(workspace_bytes, device->ops().MuonWorkspaceBytes(
                                                    shape.rows, shape.cols, shape.count, config));
  }
  auto workspace = *device->AllocateScratch(workspace_bytes);
  Direct direct(config.newton_schulz, threads, *device);
  Times update;
  Times plain;
  Times half;
  while (state.KeepRunning()) {
    state.SetIterationTime(update.Add([&] {
      for (const Matrices& matrices : model) {
        matrices.Update(device->ops(), *stream, config, workspace->data());
      }
    }));
    plain.Add([&] { direct.Run(/*half=*/false); });
    half.Add([&] { direct.Run(/*half=*/true); });
  }
  state.counters["update_s"] = update.wall_s;
  state.counters["of_plain"] = update.wall_s / plain.wall_s;
  state.counters["of_half"] = update.wall_s / half.wall_s;
  state.counters["cpu_of_plain"] = update.cpu_s / plain.cpu_s;
  state.counters["cpu_of_half"] = update.cpu_s / half.cpu_s;
}

BENCHMARK_CAPTURE(BM_MuonSet, dmuon_1_thread, "dmuon", 1)->UseManualTime()->Iterations(3);
BENCHMARK_CAPTURE(BM_MuonSet, dmuon_2_threads, "dmuon", 2)->UseManualTime()->Iterations(3);
BENCHMARK_CAPTURE(BM_MuonSet, torch_1_thread, "torch", 1)->UseManualTime()->Iterations(3);
BENCHMARK_CAPTURE(BM_MuonSet, torch_2_threads, "torch", 2)->UseManualTime()->Iterations(3);

}  // namespace
}  // namespace dmuond::kernels
