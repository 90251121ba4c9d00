// Whole Newton-Schulz and whole update of a batch, under sustained load, each checked against an
// fp64 run of the same polynomial.
//   muon_update_bench [-w SECONDS] [-J FILE] [-c ROWSxCOLS:BATCH[,...]] [-p preset] [-t 0|1]
//                     [-r STEP[,...]] [-a N]
// -r: other restarts than the preset's, in every shape.
// -t 0: tiles by rule, not measured.
// -a N: each case N times, all its memory somewhere else each time: what places cost.
// ns: the products alone (time of momentum + products, less that of momentum, which writes X).
// update: all of it. us per matrix. #wrong: error above 4e-2 (fp16) or
// 3e-2 (bf16), non-finite values, or bits that changed in a second run.
#include <cmath>
#include <fstream>
#include <memory>
#include <sstream>

#include "bench/cuda/harness.cuh"
#include "bench/cuda/newton_schulz_reference.cuh"
#include "kernels/cuda/muon_graph.h"

namespace dmuond::bench {
namespace {

using kernels::DType;
using kernels::NewtonSchulzForm;
using kernels::cuda::PassMatrix;
using kernels::cuda::PassScalars;

struct Case {
  int64_t rows;
  int64_t cols;
  int64_t batch;
};

constexpr double kMomentum = 0.95;
constexpr double kRate = 0.5;

class Bench {
 public:
  Bench(double warm, std::string json, const std::string& preset, const std::vector<int>& restarts,
        bool tuned)
      : warm_(warm),
        json_(std::move(json)),
        preset_(preset),
        config_(PresetConfig(preset)),
        tuned_(tuned) {
    if (!restarts.empty()) {
      config_.newton_schulz.restarts = restarts;
      config_.newton_schulz.restarts_near_square.clear();
      preset_ += ", restarts";
      for (const int step : restarts) preset_ += " " + std::to_string(step);
    }
    cudaDeviceProp properties{};
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    int driver = 0;
    int runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    header_ = std::string(properties.name) + ", driver CUDA " + std::to_string(driver) +
              ", runtime " + std::to_string(runtime);
    std::printf("# %s\n# preset %s; us per matrix, after %.1f s of the same launches\n",
                header_.c_str(), preset_.c_str(), warm_);
    std::printf("#%6s %6s %6s %10s %10s %9s %8s %6s %8s %6s %10s %8s\n", "rows", "cols", "batch",
                "ns(us)", "update(us)", "TFLOP/s", "SM(MHz)", "W", "SM(MHz)", "W", "error",
                "#wrong");
  }

  int64_t Run(const Case& c) {
    const int64_t elements = c.rows * c.cols;
    const int64_t slot = (elements + 3) / 4 * 4;
    Buffer<float> g(slot * c.batch);
    Buffer<float> momentum_in(slot * c.batch);
    Buffer<float> momentum_out(slot * c.batch);
    Buffer<float> master_in(slot * c.batch);
    Buffer<float> master_out(slot * c.batch);
    Buffer<__nv_bfloat16> weight(slot * c.batch + 8 * c.batch);
    momentum_in.Fill(0);
    master_in.Fill(0);
    for (int64_t z = 0; z < c.batch; ++z) {
      // Norms from 1e-20 upwards: the direction must not depend on them.
      // (The other presets' eps makes them depend on it.)
      const float scale = z == 0 || config_.newton_schulz.eps > 0
                              ? 1.0F
                              : static_cast<float>(std::pow(10.0, -20 + z % 41));
      FillRandom(g.get() + z * slot, 1, elements, elements, elements, 1, 100 + z, false,
                 Fill::kNormal, scale);
    }
    PassScalars host{};
    host.learning_rate = kRate;
    host.momentum = kMomentum;
    host.gradient_factor = 1;
    host.active = 1;
    const double scale = kernels::UpdateScale(config_.scale, c.rows, c.cols);
    kernels::cuda::TileTuner* const tuner = tuned_ ? &tuner_ : nullptr;
    const PreparedUpdate prepared = Prepare(config_, c.rows, c.cols, c.batch, tuner,
                                            kernels::ProductEngine::kOwn, /*separate=*/true);
    // As lanes run it.
    const PreparedUpdate fused = Prepare(config_, c.rows, c.cols, c.batch, tuner);
    if (prepared.graph == nullptr || fused.graph == nullptr) return 1;
    const kernels::cuda::MuonUpdate& update = prepared.update();
    ReportTiles();
    std::vector<PassMatrix> matrices;
    Buffer<double> update_squares(c.batch);
    for (int64_t z = 0; z < c.batch; ++z) {
      matrices.push_back({g.get() + z * slot, momentum_in.get() + z * slot,
                          momentum_out.get() + z * slot, master_in.get() + z * slot,
                          master_out.get() + z * slot, weight.get() + z * ((slot + 7) / 8 * 8),
                          host, update_squares.get() + z});
    }
    master_out.Fill(0xFF);
    CUDA_CHECK(prepared.graph->Launch(nullptr, matrices));
    CUDA_CHECK(cudaDeviceSynchronize());

    double worst = 0;
    Buffer<double> ref(elements);
    Buffer<double> sums(2);
    for (const int64_t z : {int64_t{0}, c.batch - 1}) {
      Reference(g.get() + z * slot, c.rows, c.cols, config_.newton_schulz, ref.get());
      sums.Fill(0);
      Difference<<<1024, 256>>>(master_out.get() + z * slot, ref.get(), elements, kRate * scale,
                                sums.get());
      const auto s = sums.ToHost(0, 2);
      const double e = std::sqrt(s[0] / s[1]);
      if (!(e <= worst)) worst = e;
      if (c.batch == 1 || elements > 20'000'000) break;
    }
    const double limit = config_.newton_schulz.dtype == DType::kBF16 ? 3e-2 : 4e-2;
    int64_t wrong = worst <= limit ? 0 : 1;
    Buffer<float> second(slot * c.batch);
    CUDA_CHECK(cudaMemcpy(second.get(), master_out.get(), slot * c.batch * sizeof(float),
                          cudaMemcpyDeviceToDevice));
    CUDA_CHECK(prepared.graph->Launch(nullptr, matrices));
    CUDA_CHECK(cudaDeviceSynchronize());
    wrong += DifferentBits(second.get(), master_out.get(), slot * c.batch);
    master_out.Fill(0xFF);
    CUDA_CHECK(fused.graph->Launch(nullptr, matrices));
    CUDA_CHECK(cudaDeviceSynchronize());
    wrong += DifferentBits(second.get(), master_out.get(), slot * c.batch);

    const int64_t p = std::min(c.rows, c.cols);
    const int64_t x_elements = c.rows * pass_ld(c.cols) * c.batch;
    Buffer<__half> expected(x_elements);
    CUDA_CHECK(cudaMemcpy(expected.get(), update.newton_schulz().result(), x_elements * 2,
                          cudaMemcpyDeviceToDevice));
    // The products destroy X: each run writes it anew.
    const auto restore = [&](cudaStream_t stream) {
      CUDA_CHECK(kernels::cuda::LaunchMomentum(stream, update.pass(), update.buffers()));
    };
    const Timing cast = TimeSustained(restore, 0.1, nvml_);
    const Timing ns = TimeSustained(
        [&](cudaStream_t stream) {
          restore(stream);
          CUDA_CHECK(update.Products(stream));
        },
        warm_, nvml_);
    // What was timed is what was checked.
    wrong += DifferentBits(static_cast<const __half*>(update.newton_schulz().result()),
                           expected.get(), x_elements);
    const Timing whole = TimeSustained(
        [&](cudaStream_t stream) {
          CUDA_CHECK(fused.update().Input(stream));
          CUDA_CHECK(fused.update().Products(stream));
          CUDA_CHECK(fused.update().Apply(stream));
        },
        warm_, nvml_);
    const double per_ns = (ns.p50_us - cast.p50_us) / static_cast<double>(c.batch);
    const double per_update = whole.p50_us / static_cast<double>(c.batch);
    const double alpha = static_cast<double>(std::max(c.rows, c.cols)) / static_cast<double>(p);
    const double p3 = static_cast<double>(p) * static_cast<double>(p) * static_cast<double>(p);
    const double flops =
        (config_.newton_schulz.form == NewtonSchulzForm::kGram ? 6 * alpha + 14 : 15 * alpha + 5) *
        p3;
    const double tflops = flops / per_ns * 1e-6;
    std::printf(" %6ld %6ld %6ld %10.2f %10.2f %9.0f %8d %6d %8d %6d %10.2e %8ld\n",
                static_cast<long>(c.rows), static_cast<long>(c.cols), static_cast<long>(c.batch),
                per_ns, per_update, tflops, ns.sm_mhz, ns.watts, whole.sm_mhz, whole.watts, worst,
                static_cast<long>(wrong));
    std::fflush(stdout);
    rows_ << (first_ ? "" : ",") << "\n{\"rows\": " << c.rows << ", \"cols\": " << c.cols
          << ", \"batch\": " << c.batch << ", \"ns_us\": " << per_ns
          << ", \"update_us\": " << per_update << ", \"tflops\": " << tflops
          << ", \"sm_mhz\": " << ns.sm_mhz << ", \"watts\": " << ns.watts
          << ", \"update_sm_mhz\": " << whole.sm_mhz << ", \"update_watts\": " << whole.watts
          << ", \"error\": " << worst << ", \"wrong\": " << wrong << "}";
    first_ = false;
    return wrong;
  }

  void Finish(const std::string& command) const {
    if (json_.empty()) return;
    std::ofstream out(json_);
    out << "{\"machine\": \"" << header_ << "\", \"command\": \"" << command << "\", \"preset\": \""
        << preset_ << "\", \"warm_seconds\": " << warm_ << ", \"rows\": [" << rows_.str()
        << "\n]}\n";
  }

 private:
  // What the tuner has chosen since the last case.
  void ReportTiles() {
    for (; reported_ < tuner_.choices().size(); ++reported_) {
      const auto& t = tuner_.choices()[reported_];
      const char* layouts[] = {"", "NT", "NN", "TN"};
      std::printf("#   %s%s %ld x %ld x %ld, batch %ld, %d addends: tile %s, %.1f us\n",
                  t.symmetric ? "symmetric " : "", layouts[static_cast<int>(t.layout)],
                  static_cast<long>(t.sizes[0]), static_cast<long>(t.sizes[1]),
                  static_cast<long>(t.sizes[2]), static_cast<long>(t.sizes[3]), t.addends,
                  Name(t.tile), t.microseconds);
    }
  }
  static int64_t pass_ld(int64_t cols) {
    return kernels::cuda::NewtonSchulz::LeadingDimension(cols);
  }

  const double warm_;
  const std::string json_;
  std::string preset_;
  MuonConfig config_;
  const bool tuned_;
  kernels::cuda::TileTuner tuner_;
  size_t reported_ = 0;
  std::string header_;
  std::ostringstream rows_;
  bool first_ = true;
  Nvml nvml_;
};

int Main(int argc, char** argv) {
  double warm = 1.0;
  std::string json;
  std::string preset = "dmuon";
  std::vector<int> restarts;
  bool tuned = true;
  int places = 1;
  std::vector<Case> cases = {{4096, 14336, 1}, {4096, 4096, 1},  {1024, 4096, 32},
                             {2048, 2048, 16}, {2048, 6144, 8},  {1536, 8960, 28},
                             {3072, 8192, 14}, {1024, 2048, 56}, {256, 1536, 56}};
  std::string command = argv[0];
  for (int i = 1; i < argc; ++i) command += std::string(" ") + argv[i];
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "-w") warm = std::atof(argv[i + 1]);
    if (flag == "-J") json = argv[i + 1];
    if (flag == "-p") preset = argv[i + 1];
    if (flag == "-r") {
      std::stringstream list(argv[i + 1]);
      for (std::string step; std::getline(list, step, ',');) restarts.push_back(std::stoi(step));
    }
    if (flag == "-t") tuned = std::atoi(argv[i + 1]) != 0;
    if (flag == "-a") places = std::atoi(argv[i + 1]);
    if (flag == "-c") {
      cases.clear();
      std::stringstream list(argv[i + 1]);
      std::string item;
      while (std::getline(list, item, ',')) {
        Case c{1, 1, 1};
        if (std::sscanf(item.c_str(), "%ldx%ld:%ld", &c.rows, &c.cols, &c.batch) >= 2) {
          cases.push_back(c);
        }
      }
    }
  }
  Bench bench(warm, json, preset, restarts, tuned);
  int64_t wrong = 0;
  constexpr size_t kMegabyte = 1 << 20;
  for (const Case& c : cases) {
    // Buffers that stay, so that those of the next run lie elsewhere.
    std::vector<std::unique_ptr<Buffer<uint8_t>>> before;
    for (int place = 0; place < places; ++place) {
      const size_t bytes = 37 * place * kMegabyte;
      before.push_back(std::make_unique<Buffer<uint8_t>>(bytes));
      wrong += bench.Run(c);
    }
  }
  bench.Finish(command);
  std::printf("# %s\n", wrong == 0 ? "all rows are right" : "WRONG RESULTS");
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace dmuond::bench

int main(int argc, char** argv) { return dmuond::bench::Main(argc, argv); }
