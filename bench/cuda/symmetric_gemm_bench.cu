// Symmetric products against cuBLASLt's full product, under sustained load.
//   symmetric_gemm_bench [-w SECONDS] [-J FILE] [-c N:BATCH[,N:BATCH...]]
// D = c*S*S + b*S, S random symmetric fp16. "lower": S and D are there in the lower form alone
// (gemm_schedule.h). Columns as in nccl-tests; #wrong counts elements that
// are off, not written or not equal to their mirror image.
#include <cmath>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>

#include "bench/cuda/harness.cuh"
#include "bench/cuda/library_product.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/library_product.h"

namespace dmuond::bench {
namespace {

using kernels::cuda::Gemm;
using kernels::cuda::GemmLayout;
using kernels::cuda::GemmOptions;
using kernels::cuda::GemmProblem;
using kernels::cuda::GemmTile;

struct Case {
  int64_t n;
  int64_t batch;
};
struct Kernel {
  GemmLayout layout;
  GemmTile tile;
};
constexpr Kernel kKernels[] = {
    {GemmLayout::kNT, GemmTile::k256}, {GemmLayout::kNT, GemmTile::k192},
    {GemmLayout::kNT, GemmTile::k128}, {GemmLayout::kNT, GemmTile::k64},
    {GemmLayout::kSS, GemmTile::k256}, {GemmLayout::kSS, GemmTile::k192}};

constexpr float kAlpha = 1.25F;
constexpr float kBeta = -0.75F;

class Bench {
 public:
  Bench(double warm_seconds, const std::string& json) : warm_(warm_seconds), json_(json) {
    cudaDeviceProp properties{};
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    int driver = 0;
    int runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    const std::string library = kernels::cuda::LibraryVersion();
    header_ = std::string(properties.name) + ", " + std::to_string(properties.multiProcessorCount) +
              " SMs, driver CUDA " + std::to_string(driver) + ", runtime " +
              std::to_string(runtime) + ", cuBLASLt " + (library.empty() ? "none" : library);
    std::printf("# %s\n# D = %.2f*S*S %+.2f*S, fp16, random; after %.1f s of the same launches\n",
                header_.c_str(), kAlpha, kBeta, warm_);
    std::printf("#%6s %6s %-18s %10s %10s %8s %8s %6s %10s %8s\n", "n", "batch", "kernel",
                "p50(us)", "p99(us)", "TFLOP/s", "SM(MHz)", "W", "error", "#wrong");
  }

  int64_t Run(const Case& c) {
    const int64_t ld = (c.n + 7) / 8 * 8;
    const int64_t stride = c.n * ld;
    const int64_t total = stride * c.batch;
    Buffer<__half> s(total);
    Buffer<__half> d(total);
    FillRandom(s.get(), c.n, c.n, ld, stride, c.batch, 17, true, Fill::kNormal,
               1.0F / std::sqrt(static_cast<float>(c.n)));
    std::vector<int64_t> compared = {0, c.batch / 2, c.batch - 1};
    if (c.batch == 1) compared.resize(1);
    std::vector<std::unique_ptr<Buffer<double>>> references;
    for (const int64_t z : compared) {
      references.push_back(std::make_unique<Buffer<double>>(c.n * c.n));
      const __half* m = s.get() + z * stride;
      const dim3 grid(static_cast<unsigned>((c.n + 63) / 64),
                      static_cast<unsigned>((c.n + 63) / 64));
      ReferenceProduct<__half><<<grid, 256>>>(references.back()->get(), m, m, m, nullptr, c.n, c.n,
                                              c.n, ld, 1, 1, ld, ld, kAlpha, kBeta, 0, 0);
      CUDA_CHECK(cudaGetLastError());
    }
    int64_t wrong = 0;
    const auto check = [&](bool symmetric) {
      Comparison worst;
      for (size_t i = 0; i < compared.size(); ++i) {
        const Comparison r = Compare(d.get() + compared[i] * stride, ld, references[i]->get(), c.n,
                                     c.n, symmetric, 0x1p-10, 2e-3);
        worst.error = std::max(worst.error, r.error);
        worst.wrong += r.wrong + r.asymmetric;
      }
      return worst;
    };
    Buffer<__half> lower(stride * c.batch);
    CUDA_CHECK(cudaMemcpy(lower.get(), s.get(), stride * c.batch * sizeof(__half),
                          cudaMemcpyDeviceToDevice));
    ToLowerForm(lower.get(), c.n, ld, stride, c.batch);
    for (const auto& [layout, tile] : kKernels) {
      const bool in_lower_form = layout == GemmLayout::kSS;
      GemmProblem p;
      p.a = {in_lower_form ? lower.get() : s.get(), c.n, c.n, ld, stride};
      p.b = p.a;
      p.c = p.a;
      p.d = {d.get(), c.n, c.n, ld, stride};
      p.batch = c.batch;
      p.symmetric = true;
      p.store_lower = in_lower_form;
      p.alpha.factor = kAlpha;
      p.beta.factor = kBeta;
      GemmOptions options;
      options.layout = layout;
      options.tile = tile;
      std::string error;
      const auto gemm = Gemm::Create({&p, 1}, options, &error);
      if (gemm == nullptr) {
        std::printf("# %s\n", error.c_str());
        return 1;
      }
      d.Fill(0xFF);
      CUDA_CHECK(gemm->Launch(nullptr));
      CUDA_CHECK(cudaDeviceSynchronize());
      const int64_t beyond = in_lower_form ? FromLowerForm(d.get(), c.n, ld, stride, c.batch) : 0;
      Comparison r = check(true);
      r.wrong += beyond;
      wrong += r.wrong;
      const Timing t = TimeSustained(
          [&](cudaStream_t stream) { CUDA_CHECK(gemm->Launch(stream, true)); }, warm_, nvml_);
      Report(c, std::string(in_lower_form ? "lower/" : "symmetric/") + Name(tile), t, 1.0, r.error,
             r.wrong);
    }
    LibraryProduct::Problem p;
    p.a = s.get();
    p.b = s.get();
    p.c = s.get();
    p.d = d.get();
    p.n = c.n;
    p.k = c.n;
    p.ld = ld;
    p.batch = c.batch;
    p.alpha = kAlpha;
    p.beta = kBeta;
    const auto library = LibraryProduct::Create(p);
    if (library != nullptr) {
      d.Fill(0xFF);
      library->Launch(nullptr);
      CUDA_CHECK(cudaDeviceSynchronize());
      const Comparison r = check(false);
      const Timing t =
          TimeSustained([&](cudaStream_t stream) { library->Launch(stream); }, warm_, nvml_);
      Report(c, "cuBLASLt full", t, 2.0, r.error, r.wrong);
    }
    return wrong;
  }

  void Finish(const std::string& command) const {
    if (json_.empty()) return;
    std::ofstream out(json_);
    out << "{\"machine\": \"" << header_ << "\", \"command\": \"" << command
        << "\", \"warm_seconds\": " << warm_ << ", \"rows\": [" << rows_.str() << "\n]}\n";
  }

 private:
  // TFLOP/s: of the operations done, n^3 for a symmetric product and 2 n^3 for a full one.
  void Report(const Case& c, const std::string& kernel, const Timing& t, double flops_of_n3,
              double error, int64_t wrong) {
    const double n = static_cast<double>(c.n);
    const double tflops = flops_of_n3 * n * n * n * c.batch / t.p50_us * 1e-6;
    std::printf(" %6ld %6ld %-18s %10.2f %10.2f %8.0f %8d %6d %10.2e %8ld\n",
                static_cast<long>(c.n), static_cast<long>(c.batch), kernel.c_str(), t.p50_us,
                t.p99_us, tflops, t.sm_mhz, t.watts, error, static_cast<long>(wrong));
    std::fflush(stdout);
    rows_ << (first_ ? "" : ",") << "\n{\"n\": " << c.n << ", \"batch\": " << c.batch
          << ", \"kernel\": \"" << kernel << "\", \"p50_us\": " << t.p50_us
          << ", \"p99_us\": " << t.p99_us << ", \"tflops\": " << tflops
          << ", \"sm_mhz\": " << t.sm_mhz << ", \"watts\": " << t.watts << ", \"error\": " << error
          << ", \"wrong\": " << wrong << "}";
    first_ = false;
  }

  const double warm_;
  const std::string json_;
  std::string header_;
  std::ostringstream rows_;
  bool first_ = true;
  Nvml nvml_;
};

int Main(int argc, char** argv) {
  double warm = 1.0;
  std::string json;
  std::vector<Case> cases = {{1024, 1},  {2048, 1}, {4096, 1}, {8192, 1}, {1024, 32},
                             {2048, 16}, {4096, 4}, {512, 64}, {256, 64}};
  std::string command = argv[0];
  for (int i = 1; i < argc; ++i) command += std::string(" ") + argv[i];
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "-w") warm = std::atof(argv[i + 1]);
    if (flag == "-J") json = argv[i + 1];
    if (flag == "-c") {
      cases.clear();
      std::stringstream list(argv[i + 1]);
      std::string item;
      while (std::getline(list, item, ',')) {
        Case c{std::atol(item.c_str()), 1};
        if (const auto colon = item.find(':'); colon != std::string::npos) {
          c.batch = std::atol(item.c_str() + colon + 1);
        }
        cases.push_back(c);
      }
    }
  }
  Bench bench(warm, json);
  int64_t wrong = 0;
  for (const Case& c : cases) wrong += bench.Run(c);
  bench.Finish(command);
  std::printf("# %s\n", wrong == 0 ? "all rows are right" : "WRONG RESULTS");
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace dmuond::bench

int main(int argc, char** argv) { return dmuond::bench::Main(argc, argv); }
