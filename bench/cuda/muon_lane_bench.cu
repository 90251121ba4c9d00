// The update of one lane's share of a model's matrices, from reduced fp32 gradients to bf16
// weights: the planner's assignment, the slowest lane, all of it in one launch.
//   muon_lane_bench [-w SECONDS] [-J FILE] [-m MODEL[:LAYERS],...] [-l LANES]
//                   [-t COST_TABLE] [-p preset] [-x 0|1]
// -t: a table that muon_tune wrote; without it the plan's costs are analytic.
// input, products, apply: these parts of all batches, each captured and timed alone, although the
// last product does `apply` in a set. sum: the same
// batches each launched alone, added up. predicted: by the cost table. #wrong:
// elements of new momenta, masters and weights whose bits differ from those of single batches, or
// that are not finite. -x 1: also the set in the configured form with a pass of its own for masters
// and weights, and in one branch and two.
#include <cmath>
#include <fstream>
#include <memory>
#include <sstream>

#include "bench/cuda/harness.cuh"
#include "bench/cuda/newton_schulz_reference.cuh"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_stream.h"
#include "scheduler/convert/convert.h"
#include "scheduler/lane_program.h"
#include "scheduler/model_layout.h"
#include "scheduler/plan.h"
#include "server/cost_file.h"

namespace dmuond::bench {
namespace {

using kernels::MuonBatch;
using kernels::MuonMatrix;
using kernels::UpdateScalars;
using kernels::cuda::PassMatrix;

struct Options {
  double warm = 1.0;
  std::string json;
  std::string preset = "dmuon";
  std::vector<std::string> models = {"llama3-8b:8",  "qwen3-1.7b",  "wall-x",
                                     "qwen2.5-1.5b", "llama3.2-3b", "llama3-8b"};
  int lanes = 4;
  std::string table;
  bool ways = false;
};

template <typename T>
void Check(const absl::StatusOr<T>& result) {
  if (result.ok()) return;
  std::fprintf(stderr, "%s\n", std::string(result.status().message()).c_str());
  std::exit(2);
}
void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  std::exit(2);
}

struct BatchShape {
  int64_t rows;
  int64_t cols;
  int64_t count;
};

struct Share {
  std::vector<BatchShape> batches;
  double predicted_us = 0;
  double imbalance = 1;
};

// The slowest lane's batches, in the order of the plan.
Share PlanShare(const std::string& model, int lanes, const scheduler::CostTable& costs,
                scheduler::Iteration iteration) {
  const auto colon = model.find(':');
  auto shapes = scheduler::FindModelShapes(
      model.substr(0, colon), colon == std::string::npos ? 0 : std::atoi(&model[colon + 1]));
  Check(shapes);
  shapes->adamw.clear();
  scheduler::PlanInputs inputs;
  inputs.layout = scheduler::LayoutOf(*shapes, 1, lanes);
  inputs.lanes_per_node = lanes;
  inputs.costs = costs;
  inputs.iterations = {iteration};
  const auto plan = scheduler::MakePlan(inputs);
  Check(plan);
  const auto& load = plan->lane_load_us;
  const auto slowest =
      static_cast<int32_t>(std::max_element(load.begin(), load.end()) - load.begin());
  const auto program = scheduler::MakeLaneProgram(inputs, *plan, scheduler::LaneId(slowest));
  Check(program);
  Share share;
  const scheduler::CostModel model_costs(costs);
  for (const scheduler::Batch& batch : program->batches) {
    const auto count = static_cast<int64_t>(batch.units.size());
    share.batches.push_back({batch.rows, batch.cols, count});
    share.predicted_us +=
        model_costs.MatrixBatch({batch.rows, batch.cols, iteration}, static_cast<int32_t>(count));
  }
  share.imbalance = plan->quality.imbalance;
  return share;
}

// State of all matrices of a share.
class State {
 public:
  explicit State(const std::vector<BatchShape>& batches) {
    int64_t elements = 0;
    for (const BatchShape& b : batches) elements += b.count * Slot(b);
    elements_ = elements;
    for (Buffer<float>** buffer :
         {&gradient_, &momentum_, &momentum_out_, &master_, &master_out_}) {
      owned_.push_back(std::make_unique<Buffer<float>>(elements));
      *buffer = owned_.back().get();
    }
    weight_ = std::make_unique<Buffer<__nv_bfloat16>>(elements);
    uint64_t seed = 1;
    for (const auto& [buffer, scale] :
         {std::pair(gradient_, 1e-3F), std::pair(momentum_, 1e-2F), std::pair(master_, 0.02F)}) {
      FillRandom(buffer->get(), 1, elements, elements, elements, 1, seed++, false, Fill::kNormal,
                 scale);
    }
    scalars_.learning_rate = 1e-3;
    scalars_.momentum = 0.95;
    scalars_.weight_decay = 0.1;
    int64_t at = 0;
    for (const BatchShape& b : batches) {
      matrices_.emplace_back();
      for (int64_t i = 0; i < b.count; ++i, at += Slot(b)) {
        matrices_.back().push_back({gradient_->get() + at, momentum_->get() + at,
                                    momentum_out_->get() + at, master_->get() + at,
                                    master_out_->get() + at, weight_->get() + at, &scalars_});
      }
    }
  }

  void Poison() {
    momentum_out_->Fill(0xFF);
    master_out_->Fill(0xFF);
    weight_->Fill(0xFF);
  }
  // Hashes of what an update writes: every bit of it counts.
  std::vector<uint64_t> Hashes() const;

  [[nodiscard]] std::vector<MuonBatch> Batches(const std::vector<BatchShape>& shapes,
                                               const MuonConfig& config) const {
    std::vector<MuonBatch> batches;
    for (size_t i = 0; i < shapes.size(); ++i) {
      batches.push_back(
          {shapes[i].rows, shapes[i].cols, kernels::DType::kBF16, &config, matrices_[i]});
    }
    return batches;
  }
  [[nodiscard]] std::vector<PassMatrix> PassMatrices() const {
    std::vector<PassMatrix> all;
    for (const auto& batch : matrices_) {
      for (const MuonMatrix& m : batch) {
        PassMatrix p{
            m.gradient, m.momentum_in, m.momentum_out, m.master_in, m.master_out, m.weight_out, {}};
        p.scalars.learning_rate = scalars_.learning_rate;
        p.scalars.momentum = scalars_.momentum;
        p.scalars.weight_decay = scalars_.weight_decay;
        p.scalars.gradient_factor = 1;
        p.scalars.active = 1;
        all.push_back(p);
      }
    }
    return all;
  }
  [[nodiscard]] int64_t elements() const { return elements_; }

 private:
  static int64_t Slot(const BatchShape& b) { return (b.rows * b.cols + 63) / 64 * 64; }
  int64_t elements_ = 0;
  UpdateScalars scalars_;
  std::vector<std::unique_ptr<Buffer<float>>> owned_;
  Buffer<float>* gradient_;
  Buffer<float>* momentum_;
  Buffer<float>* momentum_out_;
  Buffer<float>* master_;
  Buffer<float>* master_out_;
  std::unique_ptr<Buffer<__nv_bfloat16>> weight_;
  std::vector<std::vector<MuonMatrix>> matrices_;
};

// Per block of 2^20 elements, a hash of bits and places; bits that are not finite count in wrong.
__global__ void HashKernel(const float* momentum, const float* master, const __nv_bfloat16* weight,
                           int64_t elements, unsigned long long* hashes) {
  const int64_t begin = blockIdx.x * (int64_t{1} << 20);
  const int64_t end = min(begin + (int64_t{1} << 20), elements);
  unsigned long long hash = 0;
  unsigned long long bad = 0;
  for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
    // Padding between matrices keeps its poison, the same in every run.
    const uint64_t bits =
        (static_cast<uint64_t>(__float_as_uint(momentum[i])) << 32) | __float_as_uint(master[i]);
    const uint16_t w = *reinterpret_cast<const uint16_t*>(weight + i);
    hash += Mix(bits ^ Mix(static_cast<uint64_t>(i) * 65537 + w));
    bad += isfinite(master[i]) ? 0 : 1;
  }
  atomicAdd(&hashes[2 * blockIdx.x], hash);
  atomicAdd(&hashes[2 * blockIdx.x + 1], bad);
}

std::vector<uint64_t> State::Hashes() const {
  const int64_t blocks = (elements_ + (1 << 20) - 1) >> 20;
  Buffer<unsigned long long> hashes(2 * blocks);
  hashes.Fill(0);
  HashKernel<<<static_cast<unsigned>(blocks), 512>>>(momentum_out_->get(), master_out_->get(),
                                                     weight_->get(), elements_, hashes.get());
  CUDA_CHECK(cudaGetLastError());
  const auto host = hashes.ToHost(0, 2 * blocks);
  return {host.begin(), host.end()};
}

class Bench {
 public:
  explicit Bench(const Options& options)
      : options_(options), config_(PresetConfig(options.preset)) {
    auto device = kernels::cuda::CudaDevice::Create(0);
    Check(device);
    device_ = *std::move(device);
    auto stream = device_->CreateStream();
    Check(stream);
    stream_ = *std::move(stream);
    if (!options.table.empty()) {
      auto table = server::ReadCostTable(options.table);
      Check(table);
      costs_ = *std::move(table);
      Check(device_->ops().UseChoices(server::ToChoices(costs_)));
    }
    std::printf("# %s\n# preset %s, %d lanes, after %.1f s of the same launches; costs: %s\n",
                device_->Describe().c_str(), options.preset.c_str(), options.lanes, options.warm,
                options.table.empty() ? "analytic" : options.table.c_str());
    std::printf("#%-14s %8s %9s %9s %9s %9s %9s %9s %9s %7s %8s %6s %8s\n", "model", "M elem", "ms",
                "p99(ms)", "input", "products", "apply", "sum(ms)", "predicted", "off", "SM(MHz)",
                "W", "#wrong");
  }

  int64_t Run(const std::string& model) {
    const Share share =
        PlanShare(model, options_.lanes, costs_, IterationOf(config_.newton_schulz));
    std::printf("#   batches:");
    for (const BatchShape& b : share.batches) {
      std::printf(" %ldx%ld:%ld", static_cast<long>(b.rows), static_cast<long>(b.cols),
                  static_cast<long>(b.count));
    }
    std::printf("; imbalance of the plan %.3f\n", share.imbalance);
    State state(share.batches);
    const std::vector<MuonBatch> batches = state.Batches(share.batches, config_);
    kernels::Ops& ops = device_->ops();

    // One batch after the other, each alone: the reference for bits, and the sum.
    state.Poison();
    double sum_us = 0;
    {
      std::vector<kernels::MuonBatch> known;
      size_t bytes = 0;
      for (const MuonBatch& b : batches)
        bytes = std::max(bytes, ops.MuonSetWorkspaceBytes({&b, 1}));
      Buffer<uint8_t> workspace(bytes);
      for (const MuonBatch& b : batches) {
        Check(ops.UpdateMuon(*stream_, b, workspace.get()));
      }
      Check(stream_->Synchronize());
      // Equal batches once.
      for (size_t i = 0; i < batches.size(); ++i) {
        size_t same = 0;
        while (!(share.batches[same].rows == share.batches[i].rows &&
                 share.batches[same].cols == share.batches[i].cols &&
                 share.batches[same].count == share.batches[i].count)) {
          ++same;
        }
        if (same < i) {
          sums_.push_back(sums_[same]);
        } else {
          sums_.push_back(
              Time([&] { Check(ops.UpdateMuon(*stream_, batches[i], workspace.get())); },
                   options_.warm / 4)
                  .p50_us);
        }
        sum_us += sums_[i];
      }
      sums_.clear();
    }
    const std::vector<uint64_t> expected = state.Hashes();
    state.Poison();
    Buffer<uint8_t> workspace(ops.MuonSetWorkspaceBytes(batches));
    const Timing timing =
        Time([&] { Check(ops.UpdateMuonSet(*stream_, batches, workspace.get())); }, options_.warm);
    const std::vector<uint64_t> got = state.Hashes();
    int64_t wrong = -Padding(share);
    for (size_t i = 0; i < got.size(); i += 2) {
      wrong += static_cast<int64_t>(got[i + 1]) + (got[i] == expected[i] ? 0 : 1);
    }
    Report(model, state, timing, TimeParts(share, state), sum_us, share, wrong);
    if (options_.ways) TimeWays(share, state);
    return wrong == 0 ? 0 : 1;
  }

  void Finish(const std::string& command) const {
    if (options_.json.empty()) return;
    std::ofstream out(options_.json);
    out << "{\"machine\": \"" << device_->Describe() << "\", \"command\": \"" << command
        << "\", \"rows\": [" << rows_.str() << "\n]}\n";
  }

 private:
  // Poisoned elements between matrices, which are NaN.
  static int64_t Padding(const Share& share) {
    int64_t padding = 0;
    for (const BatchShape& b : share.batches) {
      const int64_t n = b.rows * b.cols;
      padding += b.count * ((n + 63) / 64 * 64 - n);
    }
    return padding;
  }

  // Launches again and again for `warm` seconds, then times.
  template <typename Launch>
  Timing Time(Launch launch, double warm) {
    const cudaStream_t stream = kernels::cuda::CudaStream::Of(*stream_);
    cudaEvent_t begin;
    cudaEvent_t end;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    launch();
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaEventRecord(begin, stream));
    launch();
    CUDA_CHECK(cudaEventRecord(end, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    float once_ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&once_ms, begin, end));
    const int warmups = static_cast<int>(warm * 1e3 / once_ms) + 1;
    const int samples = std::clamp(static_cast<int>(600 / once_ms), 7, 50);
    std::vector<cudaEvent_t> events(samples + 1);
    for (cudaEvent_t& event : events) CUDA_CHECK(cudaEventCreate(&event));
    for (int i = 0; i < warmups; ++i) launch();
    CUDA_CHECK(cudaEventRecord(events[0], stream));
    for (int i = 0; i < samples; ++i) {
      launch();
      CUDA_CHECK(cudaEventRecord(events[i + 1], stream));
    }
    Timing timing;
    CUDA_CHECK(cudaEventSynchronize(events[samples / 2]));
    timing.sm_mhz = nvml_.SmMhz();
    timing.watts = nvml_.Watts();
    CUDA_CHECK(cudaStreamSynchronize(stream));
    std::vector<double> times;
    for (int i = 0; i < samples; ++i) {
      float ms = 0;
      CUDA_CHECK(cudaEventElapsedTime(&ms, events[i], events[i + 1]));
      times.push_back(ms * 1e3);
    }
    std::sort(times.begin(), times.end());
    timing.p50_us = times[times.size() / 2];
    timing.p99_us = times[times.size() * 99 / 100];
    for (cudaEvent_t event : events) cudaEventDestroy(event);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return timing;
  }

  struct Parts {
    double input_us = 0;
    double products_us = 0;
    double apply_us = 0;
  };
  struct SetBatches {
    std::vector<std::unique_ptr<kernels::NewtonSchulzProgram>> programs;
    std::vector<kernels::cuda::MuonSetBatch> batches;
  };
  // With the own kernels and the configured form, whatever the choices.
  SetBatches MakeSetBatches(const Share& share, bool separate) const {
    SetBatches made;
    for (const BatchShape& b : share.batches) {
      auto program = kernels::BuildNewtonSchulz(config_.newton_schulz, b.rows, b.cols);
      Check(program);
      made.programs.push_back(std::make_unique<kernels::NewtonSchulzProgram>(*std::move(program)));
      made.batches.push_back({&config_, made.programs.back().get(), kernels::DType::kBF16, b.count,
                              kernels::ProductEngine::kOwn, separate});
    }
    return made;
  }

  void TimeWays(const Share& share, const State& state) {
    const cudaStream_t stream = kernels::cuda::CudaStream::Of(*stream_);
    struct Way {
      bool separate;
      int branches;
      const char* name;
    };
    for (const Way way : {Way{true, 1, "a pass of its own, one branch"},
                          Way{false, 1, "one branch"}, Way{false, 2, "two branches"}}) {
      const SetBatches made = MakeSetBatches(share, way.separate);
      Buffer<uint8_t> workspace(kernels::cuda::MuonSet::WorkspaceBytes(made.batches, way.branches));
      std::string error;
      const auto set = kernels::cuda::MuonSet::Create(made.batches, workspace.get(), &tuner_,
                                                      &error, way.branches);
      if (set == nullptr) {
        std::printf("# %s\n", error.c_str());
        return;
      }
      const std::vector<PassMatrix> matrices = state.PassMatrices();
      const Timing t = Time([&] { CUDA_CHECK(set->Launch(stream, matrices)); }, options_.warm / 2);
      std::printf("#   %-32s %9.2f ms, %d MHz, %d W\n", way.name, t.p50_us * 1e-3, t.sm_mhz,
                  t.watts);
      std::fflush(stdout);
    }
  }

  Parts TimeParts(const Share& share, const State& state) {
    const SetBatches made = MakeSetBatches(share, /*separate=*/true);
    const std::vector<kernels::cuda::MuonSetBatch>& batches = made.batches;
    Buffer<uint8_t> workspace(kernels::cuda::MuonSet::WorkspaceBytes(batches));
    std::string error;
    const auto set = kernels::cuda::MuonSet::Create(batches, workspace.get(), &tuner_, &error);
    if (set == nullptr) {
      std::printf("# %s\n", error.c_str());
      return {};
    }
    CUDA_CHECK(set->Launch(nullptr, state.PassMatrices()));
    CUDA_CHECK(cudaDeviceSynchronize());
    const auto time = [&](auto part) {
      return TimeSustained(
                 [&](cudaStream_t stream) {
                   for (size_t i = 0; i < batches.size(); ++i) {
                     CUDA_CHECK(part(set->update(i), stream));
                   }
                 },
                 options_.warm / 4, nvml_)
          .p50_us;
    };
    using kernels::cuda::MuonUpdate;
    Parts parts;
    parts.apply_us = time([](const MuonUpdate& u, cudaStream_t s) { return u.Apply(s); });
    parts.input_us = time([](const MuonUpdate& u, cudaStream_t s) { return u.Input(s); });
    parts.products_us = time([](const MuonUpdate& u, cudaStream_t s) {
                          const cudaError_t input = u.Input(s);
                          return input == cudaSuccess ? u.Products(s) : input;
                        }) -
                        parts.input_us;
    return parts;
  }

  void Report(const std::string& model, const State& state, const Timing& t, const Parts& parts,
              double sum_us, const Share& share, int64_t wrong) {
    const double off = share.predicted_us / t.p50_us - 1;
    std::printf(" %-14s %8.1f %9.2f %9.2f %9.2f %9.2f %9.2f %9.2f %9.2f %6.1f%% %8d %6d %8ld\n",
                model.c_str(), static_cast<double>(state.elements()) * 1e-6, t.p50_us * 1e-3,
                t.p99_us * 1e-3, parts.input_us * 1e-3, parts.products_us * 1e-3,
                parts.apply_us * 1e-3, sum_us * 1e-3, share.predicted_us * 1e-3, 100 * off,
                t.sm_mhz, t.watts, static_cast<long>(wrong));
    std::fflush(stdout);
    rows_ << (first_ ? "" : ",") << "\n{\"model\": \"" << model
          << "\", \"p50_ms\": " << t.p50_us * 1e-3 << ", \"p99_ms\": " << t.p99_us * 1e-3
          << ", \"input_ms\": " << parts.input_us * 1e-3
          << ", \"products_ms\": " << parts.products_us * 1e-3
          << ", \"apply_ms\": " << parts.apply_us * 1e-3 << ", \"sum_ms\": " << sum_us * 1e-3
          << ", \"predicted_ms\": " << share.predicted_us * 1e-3
          << ", \"imbalance\": " << share.imbalance << ", \"sm_mhz\": " << t.sm_mhz
          << ", \"watts\": " << t.watts << ", \"wrong\": " << wrong << "}";
    first_ = false;
  }

  const Options options_;
  const MuonConfig config_;
  kernels::cuda::TileTuner tuner_;
  scheduler::CostTable costs_;
  std::unique_ptr<kernels::cuda::CudaDevice> device_;
  std::unique_ptr<kernels::Stream> stream_;
  std::vector<double> sums_;
  std::ostringstream rows_;
  bool first_ = true;
  Nvml nvml_;
};

std::vector<std::string> SplitList(const std::string& text) {
  std::vector<std::string> items;
  std::stringstream list(text);
  for (std::string item; std::getline(list, item, ',');) items.push_back(item);
  return items;
}

int Main(int argc, char** argv) {
  Options options;
  std::string command = argv[0];
  for (int i = 1; i < argc; ++i) command += std::string(" ") + argv[i];
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "-w") options.warm = std::atof(argv[i + 1]);
    if (flag == "-J") options.json = argv[i + 1];
    if (flag == "-p") options.preset = argv[i + 1];
    if (flag == "-l") options.lanes = std::atoi(argv[i + 1]);
    if (flag == "-t") options.table = argv[i + 1];
    if (flag == "-x") options.ways = std::atoi(argv[i + 1]) != 0;
    if (flag == "-m") options.models = SplitList(argv[i + 1]);
  }
  Bench bench(options);
  int64_t wrong = 0;
  for (const std::string& model : options.models) wrong += bench.Run(model);
  bench.Finish(command);
  std::printf("# %s\n", wrong == 0 ? "all rows are right" : "WRONG RESULTS");
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace dmuond::bench

int main(int argc, char** argv) { return dmuond::bench::Main(argc, argv); }
