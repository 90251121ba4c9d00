// One lane's share of a model, the slowest lane's of the planner's assignment, as lanes compute it:
// batch by batch, each part beside what its bytes or FLOPs would take.
//   muon_lane_bench [-w SECONDS] [-J FILE] [-m MODEL[:LAYERS],...] [-l LANES]
//                   [-t COST_TABLE] [-p preset] [-n LANE]
// -t: a table that muon_tune wrote; without it the plan's costs are analytic. -n: that lane's
// share. muon: all batches, one after the other, from reduced fp32 gradients to bf16 weights;
// TFLOP/s of its products, symmetric ones counted as half. foretold: by the cost table. sums: of
// four bf16 replicas, with their squares. adamw: the lane's part of what is not a matrix. publish:
// weights to one place of this device. GB/s: bytes read and written. all: sums, then for each batch
// its update and its weights' way out, then AdamW and its weights'. #wrong: elements of new
// momenta, masters and weights that are not finite, and blocks of them whose bits are others when
// all batches are updated in one call.
#include <cmath>
#include <deque>
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
using kernels::StridedBox;
using kernels::UpdateScalars;

struct Options {
  double warm = 1.0;
  std::string json;
  std::string preset = "dmuon";
  std::vector<std::string> models = {"llama3-8b:8",  "qwen3-1.7b",  "wall-x",
                                     "qwen2.5-1.5b", "llama3.2-3b", "llama3-8b"};
  int lanes = 4;
  int lane = -1;  // the slowest
  std::string table;
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
  bool operator==(const BatchShape&) const = default;
};

struct Share {
  std::vector<BatchShape> batches;
  int64_t adamw_elements = 0;
  double predicted_us = 0;
  double imbalance = 1;
};

// The batches of a lane, of the slowest one where lane < 0, in the order of the plan.
Share PlanShare(const std::string& model, int lanes, int lane, const scheduler::CostTable& costs,
                scheduler::Iteration iteration) {
  const auto colon = model.find(':');
  auto shapes = scheduler::FindModelShapes(
      model.substr(0, colon), colon == std::string::npos ? 0 : std::atoi(&model[colon + 1]));
  Check(shapes);
  Share share;
  for (const scheduler::ShapeCount& shape : shapes->adamw) {
    share.adamw_elements += shape.rows * shape.cols * shape.count;
  }
  share.adamw_elements = (share.adamw_elements / lanes + 65535) / 65536 * 65536;
  shapes->adamw.clear();
  scheduler::PlanInputs inputs;
  inputs.layout = scheduler::LayoutOf(*shapes, 1, lanes);
  inputs.lanes_per_node = lanes;
  inputs.costs = costs;
  inputs.iterations = {iteration};
  const auto plan = scheduler::MakePlan(inputs);
  Check(plan);
  const auto& load = plan->lane_load_us;
  const auto slowest = static_cast<int>(std::max_element(load.begin(), load.end()) - load.begin());
  const auto program =
      scheduler::MakeLaneProgram(inputs, *plan, scheduler::LaneId(lane < 0 ? slowest : lane));
  Check(program);
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

__global__ void Square(float* values, int64_t count) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    values[i] *= values[i];
  }
}

// Gradients, state and weights of a share: its matrices, then what is not a matrix.
class State {
 public:
  State(const Share& share, kernels::Device& device) {
    for (const BatchShape& b : share.batches) matrix_elements_ += b.count * Slot(b);
    elements_ = matrix_elements_ + share.adamw_elements;
    uint64_t seed = 1;
    const auto random = [&](auto& buffer, float scale) {
      FillRandom(buffer.get(), 1, elements_, elements_, elements_, 1, seed++, false, Fill::kNormal,
                 scale);
    };
    for (int part = 0; part < kParts; ++part) {
      parts_.push_back(std::make_unique<Buffer<float>>(elements_));
    }
    random(*parts_[kMomentum], 1e-2F);
    random(*parts_[kMaster], 0.02F);
    random(*parts_[kSecondMoment], 1e-4F);
    Square<<<1056, 256>>>(parts_[kSecondMoment]->get(), elements_);
    for (int i = 0; i < kReplicas; ++i) {
      replicas_.push_back(std::make_unique<Buffer<__nv_bfloat16>>(elements_));
      random(*replicas_.back(), 1e-3F);
    }
    weight_ = std::make_unique<Buffer<__nv_bfloat16>>(elements_);
    published_ = std::make_unique<Buffer<__nv_bfloat16>>(elements_);
    auto squares = device.AllocateHost((elements_ / 65536 + share.batches.size() * 1024) * 8);
    Check(squares);
    squares_ = *std::move(squares);
    scalars_.learning_rate = 1e-3;
    scalars_.momentum = 0.95;
    scalars_.weight_decay = 0.1;
    scalars_.beta1 = 0.9;
    scalars_.beta2 = 0.95;
    scalars_.eps = 1e-8;
    int64_t at = 0;
    auto* squares_at = reinterpret_cast<double*>(squares_->data());
    const auto add_sum = [&](int64_t first, int64_t count) {
      sources_.emplace_back();
      for (const auto& replica : replicas_) {
        sources_.back().push_back(Run(replica->get() + first, kernels::DType::kBF16, count));
      }
      sums_.back().push_back({Run(parts_[kGradient]->get() + first, kernels::DType::kF32, count),
                              sources_.back(),
                              {},
                              1.0F / kReplicas,
                              squares_at});
      squares_at += kernels::NormBlocks(0, count);
    };
    for (const BatchShape& b : share.batches) {
      matrices_.emplace_back();
      sums_.emplace_back();
      for (int64_t i = 0; i < b.count; ++i, at += Slot(b)) {
        const auto place = [&](Part part) { return parts_[part]->get() + at; };
        matrices_.back().push_back({place(kGradient), place(kMomentum), place(kMomentumOut),
                                    place(kMaster), place(kMasterOut), weight_->get() + at,
                                    &scalars_});
        add_sum(at, b.rows * b.cols);
      }
    }
    sums_.emplace_back();
    const auto place = [&](Part part) { return parts_[part]->get() + at; };
    if (share.adamw_elements > 0) {
      add_sum(at, share.adamw_elements);
      piece_ = {share.adamw_elements, kernels::DType::kBF16, place(kGradient),  place(kMomentum),
                place(kMomentumOut),  place(kSecondMoment),  place(kSecondOut), place(kMaster),
                place(kMasterOut),    weight_->get() + at,   &scalars_};
    }
  }

  void Poison() {
    parts_[kMomentumOut]->Fill(0xFF);
    parts_[kMasterOut]->Fill(0xFF);
    weight_->Fill(0xFF);
  }
  // Hashes of what an update of the matrices writes: every bit of it counts.
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
  // By batch; of what is not a matrix at the end.
  [[nodiscard]] const std::vector<std::vector<kernels::SumTask>>& sums() const { return sums_; }
  [[nodiscard]] const kernels::AdamWPiece& piece() const { return piece_; }
  // The weights of a sum's elements, and where they go.
  [[nodiscard]] std::pair<StridedBox, StridedBox> WayOut(const kernels::SumTask& sum) const {
    const int64_t count = sum.dst.shape[0];
    const int64_t at = reinterpret_cast<const float*>(sum.dst.data) - parts_[kGradient]->get();
    return {Run(published_->get() + at, kernels::DType::kBF16, count),
            Run(weight_->get() + at, kernels::DType::kBF16, count)};
  }
  [[nodiscard]] int64_t elements() const { return elements_; }

  static constexpr int kReplicas = 4;

 private:
  enum Part {
    kGradient,
    kMomentum,
    kMomentumOut,
    kMaster,
    kMasterOut,
    kSecondMoment,
    kSecondOut,
    kParts
  };
  static int64_t Slot(const BatchShape& b) { return (b.rows * b.cols + 63) / 64 * 64; }
  static StridedBox Run(void* data, kernels::DType type, int64_t count) {
    return {static_cast<std::byte*>(data), type, 1, {count}, {1}};
  }

  int64_t matrix_elements_ = 0;
  int64_t elements_ = 0;
  UpdateScalars scalars_;
  std::vector<std::unique_ptr<Buffer<float>>> parts_;
  std::vector<std::unique_ptr<Buffer<__nv_bfloat16>>> replicas_;
  std::unique_ptr<Buffer<__nv_bfloat16>> weight_;
  std::unique_ptr<Buffer<__nv_bfloat16>> published_;
  std::unique_ptr<kernels::Mapping> squares_;
  std::vector<std::vector<MuonMatrix>> matrices_;
  std::deque<std::vector<StridedBox>> sources_;  // pointed to
  std::vector<std::vector<kernels::SumTask>> sums_;
  kernels::AdamWPiece piece_;
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
  const int64_t blocks = (matrix_elements_ + (1 << 20) - 1) >> 20;
  Buffer<unsigned long long> hashes(2 * blocks);
  hashes.Fill(0);
  HashKernel<<<static_cast<unsigned>(blocks), 512>>>(parts_[kMomentumOut]->get(),
                                                     parts_[kMasterOut]->get(), weight_->get(),
                                                     matrix_elements_, hashes.get());
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
    std::printf("#%-14s %7s %8s %7s %9s %8s %6s %8s %6s %8s %6s %8s %7s %5s %6s\n", "model",
                "M elem", "muon(ms)", "TFLOP/s", "foretold", "sums(ms)", "GB/s", "adamw", "GB/s",
                "publish", "GB/s", "all(ms)", "SM(MHz)", "W", "#wrong");
  }

  int64_t Run(const std::string& model) {
    const Share share =
        PlanShare(model, options_.lanes, options_.lane, costs_, IterationOf(config_.newton_schulz));
    State state(share, *device_);
    const std::vector<MuonBatch> batches = state.Batches(share.batches, config_);
    kernels::Ops& ops = device_->ops();
    size_t bytes = 0;
    for (const MuonBatch& b : batches) {
      const auto matrices = static_cast<int64_t>(b.matrices.size());
      bytes = std::max(bytes, ops.MuonWorkspaceBytes(b.rows, b.cols, matrices, config_));
    }
    Buffer<uint8_t> workspace(bytes);

    const auto sum = [&](size_t batch) { Check(ops.Sum(*stream_, state.sums()[batch])); };
    const auto muon = [&](size_t batch) {
      Check(ops.UpdateMuon(*stream_, batches[batch], workspace.get()));
    };
    const auto adamw = [&] {
      if (share.adamw_elements > 0) Check(ops.UpdateAdamW(*stream_, {&state.piece(), 1}));
    };
    const auto publish = [&](size_t batch) {
      for (const kernels::SumTask& task : state.sums()[batch]) {
        const auto [to, from] = state.WayOut(task);
        Check(ops.Copy(*stream_, to, from));
      }
    };
    const auto each = [&](size_t count, auto part) {
      return [count, part] {
        for (size_t i = 0; i < count; ++i) part(i);
      };
    };
    const size_t n = batches.size();
    state.Poison();
    each(n + 1, sum)();
    each(n, muon)();
    Check(stream_->Synchronize());
    const std::vector<uint64_t> expected = state.Hashes();
    state.Poison();
    each(n, muon)();
    Check(stream_->Synchronize());
    const std::vector<uint64_t> got = state.Hashes();
    int64_t wrong = -Padding(share);
    for (size_t i = 0; i < got.size(); i += 2) {
      wrong += static_cast<int64_t>(got[i + 1]) + (got[i] == expected[i] ? 0 : 1);
    }

    Row row;
    row.muon = Time(each(n, muon), options_.warm);
    row.sums = Time(each(n + 1, sum), options_.warm / 4);
    row.adamw = Time(adamw, options_.warm / 4);
    row.publish = Time(each(n + 1, publish), options_.warm / 4);
    row.all = Time(
        [&] {
          each(n + 1, sum)();
          for (size_t i = 0; i < n; ++i) {
            muon(i);
            publish(i);
          }
          adamw();
          publish(n);
        },
        options_.warm);
    Report(model, share, state, row, wrong);
    for (size_t i = 0; i < n; ++i) {
      const BatchShape& b = share.batches[i];
      // Equal batches once.
      if (i > 0 && b == share.batches[i - 1]) continue;
      const double us = Time([&] { muon(i); }, options_.warm / 4).p50_us;
      std::printf("#   %ldx%ld:%ld %46.1f us, %.1f a matrix, %.0f TFLOP/s\n",
                  static_cast<long>(b.rows), static_cast<long>(b.cols), static_cast<long>(b.count),
                  us, us / static_cast<double>(b.count), Flops(b) / us * 1e-6);
    }
    std::fflush(stdout);
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

  // Counts a batch's products; a symmetric one as the triangle that is computed of it.
  [[nodiscard]] double Flops(const BatchShape& b) const {
    const auto program = kernels::BuildNewtonSchulz(config_.newton_schulz, b.rows, b.cols);
    Check(program);
    const auto p = static_cast<double>(program->p);
    const auto q = static_cast<double>(program->q);
    double flops = 0;
    for (const kernels::Product& product : program->products) {
      flops += product.kind == kernels::ProductKind::kSymmetric ? p * p * p
               : product.kind == kernels::ProductKind::kGram    ? p * p * q
                                                                : 2 * p * p * q;
    }
    return flops * static_cast<double>(b.count);
  }

  struct Row {
    Timing muon, sums, adamw, publish, all;
  };
  void Report(const std::string& model, const Share& share, const State& state, const Row& row,
              int64_t wrong) {
    double flops = 0;
    for (const BatchShape& b : share.batches) flops += Flops(b);
    const auto rate = [](double bytes_per_element, int64_t elements, const Timing& t) {
      return t.p50_us > 0 ? bytes_per_element * static_cast<double>(elements) / t.p50_us * 1e-3 : 0;
    };
    const double tflops = flops / row.muon.p50_us * 1e-6;
    const double off = share.predicted_us / row.muon.p50_us - 1;
    const double sums = rate(2 * State::kReplicas + 4, state.elements(), row.sums);
    const double adamw = rate(30, share.adamw_elements, row.adamw);
    const double publish = rate(4, state.elements(), row.publish);
    std::printf(
        " %-14s %7.1f %8.2f %7.0f %8.1f%% %8.2f %6.0f %8.2f %6.0f %8.2f %6.0f %8.2f %7d %5d %6ld\n",
        model.c_str(), static_cast<double>(state.elements()) * 1e-6, row.muon.p50_us * 1e-3, tflops,
        100 * off, row.sums.p50_us * 1e-3, sums, row.adamw.p50_us * 1e-3, adamw,
        row.publish.p50_us * 1e-3, publish, row.all.p50_us * 1e-3, row.muon.sm_mhz, row.muon.watts,
        static_cast<long>(wrong));
    std::fflush(stdout);
    rows_ << (first_ ? "" : ",") << "\n{\"model\": \"" << model
          << "\", \"muon_ms\": " << row.muon.p50_us * 1e-3
          << ", \"muon_p99_ms\": " << row.muon.p99_us * 1e-3 << ", \"tflops\": " << tflops
          << ", \"foretold_ms\": " << share.predicted_us * 1e-3
          << ", \"sums_ms\": " << row.sums.p50_us * 1e-3 << ", \"sums_gb_per_s\": " << sums
          << ", \"adamw_ms\": " << row.adamw.p50_us * 1e-3 << ", \"adamw_gb_per_s\": " << adamw
          << ", \"publish_ms\": " << row.publish.p50_us * 1e-3
          << ", \"publish_gb_per_s\": " << publish << ", \"all_ms\": " << row.all.p50_us * 1e-3
          << ", \"imbalance\": " << share.imbalance << ", \"sm_mhz\": " << row.muon.sm_mhz
          << ", \"watts\": " << row.muon.watts << ", \"wrong\": " << wrong << "}";
    first_ = false;
  }

  const Options options_;
  const MuonConfig config_;
  scheduler::CostTable costs_;
  std::unique_ptr<kernels::cuda::CudaDevice> device_;
  std::unique_ptr<kernels::Stream> stream_;
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
    if (flag == "-n") options.lane = std::atoi(argv[i + 1]);
    if (flag == "-t") options.table = argv[i + 1];
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
