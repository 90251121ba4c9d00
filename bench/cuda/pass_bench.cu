// The passes over memory against a device copy, in bytes read and written per second, each checked
// on the host.
//   pass_bench [-w SECONDS] [-J FILE]
// #wrong: elements of the first million and the last thousand that differ from the same formula on
// the host (bit for bit for sums; within rounding of fused operations for the others).
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <sstream>

#include "bench/cuda/harness.cuh"
#include "kernels/cuda/element_passes.h"
#include "kernels/cuda/muon_passes.h"

namespace dmuond::bench {
namespace {

using kernels::cuda::AdamWPass;
using kernels::cuda::PassBuffers;
using kernels::cuda::PassMatrix;
using kernels::cuda::PassScalars;
using kernels::cuda::PassShape;
using kernels::cuda::SquaresPass;
using kernels::cuda::SumPass;
using kernels::cuda::WeightType;

constexpr int64_t kRows = 8192;
constexpr int64_t kCols = 8192;
constexpr int64_t kElements = kRows * kCols;
// Checked at both ends; a size that is no multiple of anything.
constexpr int64_t kOdd = kElements - 13;

bool Near(double x, double y) { return std::fabs(x - y) <= 1e-6 * (1 + std::fabs(y)); }

class Bench {
 public:
  Bench(double warm, std::string json) : warm_(warm), json_(std::move(json)) {
    cudaDeviceProp properties{};
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    name_ = properties.name;
    std::printf("# %s\n#%-32s %10s %10s %8s %8s %6s %8s\n", name_.c_str(), "pass", "p50(us)",
                "GB/s", "of copy", "SM(MHz)", "W", "#wrong");
  }

  int64_t Run() {
    Buffer<float> a(kElements);
    Buffer<float> b(kElements);
    Report("copy", 8, 0, [&](cudaStream_t stream) {
      CUDA_CHECK(
          cudaMemcpyAsync(b.get(), a.get(), kElements * 4, cudaMemcpyDeviceToDevice, stream));
    });
    Sums();
    Squares();
    AdamW();
    Muon();
    return wrong_;
  }

  void Finish(const std::string& command) const {
    if (json_.empty()) return;
    std::ofstream out(json_);
    out << "{\"machine\": \"" << name_ << "\", \"command\": \"" << command << "\", \"rows\": ["
        << rows_.str() << "\n]}\n";
  }

 private:
  template <typename F>
  void Report(const std::string& pass, double bytes_per_element, int64_t wrong, F launch) {
    const Timing t = TimeSustained(launch, warm_, nvml_);
    const double rate = bytes_per_element * kElements / t.p50_us * 1e-3;
    if (copy_ == 0) copy_ = rate;
    std::printf(" %-32s %10.1f %10.0f %7.0f%% %8d %6d %8ld\n", pass.c_str(), t.p50_us, rate,
                100 * rate / copy_, t.sm_mhz, t.watts, static_cast<long>(wrong));
    std::fflush(stdout);
    rows_ << (wrong_rows_++ == 0 ? "" : ",") << "\n{\"pass\": \"" << pass
          << "\", \"p50_us\": " << t.p50_us << ", \"gb_per_s\": " << rate
          << ", \"of_copy\": " << rate / copy_ << ", \"sm_mhz\": " << t.sm_mhz
          << ", \"watts\": " << t.watts << ", \"wrong\": " << wrong << "}";
    wrong_ += wrong;
  }

  template <typename T>
  static void Random(Buffer<T>& x, uint64_t seed, float scale) {
    FillRandom(x.get(), kRows, kCols, kCols, kElements, 1, seed, false, Fill::kNormal, scale);
  }
  // Calls f(first, count) for both ends of the first kOdd elements.
  template <typename F>
  static int64_t AtBothEnds(F f) {
    return f(int64_t{0}, int64_t{1'000'000}) + f(kOdd - 1000, int64_t{1000});
  }

  struct Source {
    WeightType type;
    int level = 0;
    const void* data = nullptr;
    std::function<std::vector<float>(int64_t first, int64_t n)> read;
  };
  template <typename T>
  static std::unique_ptr<Buffer<T>> Own(Source& source, uint64_t seed) {
    auto buffer = std::make_unique<Buffer<T>>(kElements);
    Random(*buffer, seed, 1.0F);
    source.data = buffer->get();
    source.read = [from = buffer.get()](int64_t first, int64_t n) {
      const std::vector<T> host = from->ToHost(first, n);
      return std::vector<float>(host.begin(), host.end());
    };
    return buffer;
  }

  // The tree as kernels/ops.h says it, level by level: a node of a level stands for 2^level leaves.
  static std::vector<float> SumOnHost(std::span<const Source> sources, int absent, int64_t first,
                                      int64_t n) {
    std::map<int64_t, std::vector<float>> nodes;  // by the first leaf of each
    int64_t leaf = 0;
    for (size_t s = 0; s < sources.size(); ++s) {
      if (static_cast<int>(s) != absent) nodes[leaf] = sources[s].read(first, n);
      leaf += int64_t{1} << sources[s].level;
    }
    for (int64_t width = 1; width < leaf; width *= 2) {
      for (int64_t at = 0; at < leaf; at += 2 * width) {
        const auto right = nodes.find(at + width);
        if (right == nodes.end()) continue;
        std::vector<float>& left = nodes[at];
        left.resize(n, -0.0F);  // of an absent one: -0 + x is x
        for (int64_t e = 0; e < n; ++e) left[e] += right->second[e];
        nodes.erase(right);
      }
    }
    return nodes[0];
  }

  // `squares`: of the result too, compared with a pass of their own.
  void Sums(const std::string& name, std::vector<Source> sources, bool squares) {
    std::vector<std::unique_ptr<Buffer<float>>> wide;
    std::vector<std::unique_ptr<Buffer<__nv_bfloat16>>> bf16;
    std::vector<std::unique_ptr<Buffer<__half>>> fp16;
    double bytes = 4;
    for (Source& source : sources) {
      const uint64_t seed = 50 + (&source - sources.data());
      switch (source.type) {
        case WeightType::kF32:
          wide.push_back(Own<float>(source, seed));
          break;
        case WeightType::kBF16:
          bf16.push_back(Own<__nv_bfloat16>(source, seed));
          break;
        default:
          fp16.push_back(Own<__half>(source, seed));
      }
      bytes += source.type == WeightType::kF32 ? 4 : 2;
    }
    Buffer<float> out(kElements);
    Buffer<double> sums(kElements / 65536);
    Buffer<double> expected(kElements / 65536);
    int64_t wrong = 0;
    SumPass pass;
    // Also with one absent, then whole.
    for (const int absent : {1, -1}) {
      out.Fill(0xFF);
      sums.Fill(0xFF);
      pass = {};
      kernels::cuda::SumTree tree(pass);
      for (size_t s = 0; s < sources.size(); ++s) {
        const bool present = static_cast<int>(s) != absent;
        tree.Add(present ? sources[s].data : nullptr, sources[s].type, sources[s].level);
      }
      tree.Finish();
      pass.destination = out.get();
      pass.elements = kOdd;
      pass.factor = 0.25F;
      pass.squares = squares ? sums.get() : nullptr;
      CUDA_CHECK(kernels::cuda::LaunchSum(nullptr, {&pass, 1}));
      CUDA_CHECK(cudaDeviceSynchronize());
      wrong += AtBothEnds([&](int64_t first, int64_t n) {
        const std::vector<float> want = SumOnHost(sources, absent, first, n);
        const auto got = out.ToHost(first, n);
        int64_t bad = 0;
        for (int64_t e = 0; e < n; ++e) {
          const float scaled = want[e] * pass.factor;
          if (std::memcmp(&scaled, &got[e], 4) != 0) ++bad;
        }
        return bad;
      });
      if (!squares) continue;
      const SquaresPass alone{out.get(), kOdd, 0, expected.get()};
      CUDA_CHECK(kernels::cuda::LaunchSquares(nullptr, {&alone, 1}));
      CUDA_CHECK(cudaDeviceSynchronize());
      if (sums.ToHost(0, sums.count()) != expected.ToHost(0, expected.count())) ++wrong;
    }
    Report(name, bytes, wrong, [&](cudaStream_t stream) {
      CUDA_CHECK(kernels::cuda::LaunchSum(stream, {&pass, 1}));
    });
  }
  void Sums() {
    constexpr auto kBF16 = WeightType::kBF16;
    constexpr auto kF16 = WeightType::kF16;
    constexpr auto kF32 = WeightType::kF32;
    const std::vector<std::pair<std::string, std::vector<Source>>> all = {
        {"4 bf16", {4, {kBF16}}},
        {"8 bf16", {8, {kBF16}}},
        {"3 fp16", {3, {kF16}}},
        {"4 fp32", {4, {kF32}}},
        {"2 bf16, 2 fp32", {{kBF16}, {kF32}, {kF32}, {kBF16}}},
        {"2 bf16, half a tree", {{kBF16}, {kBF16}, {kF32, 1}}},
        {"half a tree, 2 bf16", {{kF32, 1}, {kBF16}, {kBF16}}},
        {"4 bf16, 3 quarters",
         {{kBF16}, {kBF16}, {kBF16}, {kBF16}, {kF32, 2}, {kF32, 2}, {kF32, 2}}},
    };
    for (const bool squares : {false, true}) {
      for (const auto& [name, sources] : all) {
        Sums("sum of " + name + (squares ? ", squares" : ""), sources, squares);
      }
    }
  }

  void Squares() {
    Buffer<float> x(kElements);
    Random(x, 7, 1.0F);
    constexpr int64_t kFirst = 4 * 1001;
    const int64_t blocks = (kFirst + kOdd - 1) / 65536 + 1;
    Buffer<double> sums(blocks);
    sums.Fill(0xFF);
    SquaresPass pass{x.get(), kOdd, kFirst, sums.get()};
    CUDA_CHECK(kernels::cuda::LaunchSquares(nullptr, {&pass, 1}));
    CUDA_CHECK(cudaDeviceSynchronize());
    const auto got = sums.ToHost(0, blocks);
    int64_t wrong = 0;
    for (const int64_t block : {int64_t{0}, int64_t{1}, blocks - 1}) {
      const int64_t from = std::max<int64_t>(block * 65536 - kFirst, 0);
      const int64_t to = std::min<int64_t>((block + 1) * 65536 - kFirst, kOdd);
      double want = 0;
      for (const float v : x.ToHost(from, to - from)) want += static_cast<double>(v) * v;
      if (!(std::fabs(got[block] - want) <= 1e-12 * want)) ++wrong;
    }
    Report("sums of squares, fp32", 4, wrong, [&](cudaStream_t stream) {
      CUDA_CHECK(kernels::cuda::LaunchSquares(stream, {&pass, 1}));
    });
  }

  static PassScalars Scalars() {
    PassScalars s{};
    s.learning_rate = 1e-3;
    s.momentum = 0.95;
    s.weight_decay = 0.1;
    s.gradient_factor = 0.5;
    s.beta1 = 0.9;
    s.beta2 = 0.95;
    s.eps = 1e-8;
    s.bias_correction1 = 1 - std::pow(0.9, 3);
    s.bias_correction2 = 1 - std::pow(0.95, 3);
    s.active = 1;
    return s;
  }

  void AdamW() {
    Buffer<float> g(kElements), m(kElements), v(kElements), w(kElements);
    Buffer<float> m_out(kElements), v_out(kElements), w_out(kElements);
    Buffer<__nv_bfloat16> weight(kElements);
    Random(g, 1, 1.0F);
    Random(m, 2, 0.1F);
    Random(w, 4, 1.0F);
    v.Fill(0x3C);  // 0.0115
    const PassScalars s = Scalars();
    const AdamWPass pass{kOdd,        g.get(), m.get(),     m_out.get(),  v.get(),
                         v_out.get(), w.get(), w_out.get(), weight.get(), s};
    w_out.Fill(0xFF);
    CUDA_CHECK(kernels::cuda::LaunchAdamW(nullptr, WeightType::kBF16, {&pass, 1}));
    CUDA_CHECK(cudaDeviceSynchronize());
    const int64_t wrong = AtBothEnds([&](int64_t first, int64_t n) {
      const auto hg = g.ToHost(first, n), hm = m.ToHost(first, n), hv = v.ToHost(first, n),
                 hw = w.ToHost(first, n), om = m_out.ToHost(first, n), ov = v_out.ToHost(first, n),
                 ow = w_out.ToHost(first, n);
      const auto o16 = weight.ToHost(first, n);
      int64_t bad = 0;
      for (int64_t i = 0; i < n; ++i) {
        const double gradient = hg[i] * s.gradient_factor;
        const double wm = hm[i] + (1 - s.beta1) * (gradient - hm[i]);
        const double wv = hv[i] * s.beta2 + (1 - s.beta2) * gradient * gradient;
        const double ww = hw[i] * (1 - s.learning_rate * s.weight_decay) -
                          s.learning_rate / s.bias_correction1 * wm /
                              (std::sqrt(wv) / std::sqrt(s.bias_correction2) + s.eps);
        const bool ok =
            std::fabs(om[i] - wm) <= 1e-6 && Near(ov[i], wv) && std::fabs(ow[i] - ww) <= 1e-6 &&
            static_cast<float>(o16[i]) == static_cast<float>(static_cast<__nv_bfloat16>(ow[i]));
        if (!ok) ++bad;
      }
      return bad;
    });
    Report("AdamW, bf16 weights", 4 * 7 + 2, wrong, [&](cudaStream_t stream) {
      CUDA_CHECK(kernels::cuda::LaunchAdamW(stream, WeightType::kBF16, {&pass, 1}));
    });
  }

  void Muon() {
    Buffer<float> g(kElements), b(kElements), w(kElements), b_out(kElements), w_out(kElements);
    Buffer<__nv_bfloat16> weight(kElements);
    Buffer<__half> x(kElements);
    Random(g, 1, 1.0F);
    Random(b, 2, 3.0F);
    Random(w, 4, 1.0F);
    const PassScalars s = Scalars();
    PassShape shape;
    shape.rows = kRows;
    shape.cols = kCols;
    shape.x_ld = kCols;
    shape.weight = WeightType::kBF16;
    shape.update_scale = 2;
    Buffer<double> partials(kernels::cuda::NormPartials(shape));
    Buffer<float> norms(3);
    PassBuffers buffers;
    buffers.partials = partials.get();
    buffers.scale = norms.get();
    buffers.inverse_norm = norms.get() + 1;
    buffers.inverse_norm_squared = norms.get() + 2;
    Buffer<uint32_t> recast(1);
    buffers.recast = recast.get();
    buffers.count = 1;
    buffers.x = x.get();
    buffers.result = x.get();
    buffers.result_scale = 4;
    Buffer<double> squares(2);
    buffers.squares = squares.get();
    const PassMatrix host{g.get(),     b.get(),      b_out.get(), w.get(),
                          w_out.get(), weight.get(), s,           squares.get() + 1};
    Buffer<PassMatrix> matrix(1);
    CUDA_CHECK(cudaMemcpy(matrix.get(), &host, sizeof(host), cudaMemcpyHostToDevice));
    buffers.matrices = matrix.get();
    const auto momentum = [&](cudaStream_t stream) {
      CUDA_CHECK(kernels::cuda::LaunchMomentum(stream, shape, buffers));
    };
    const auto norms_of = [&](cudaStream_t stream) {
      CUDA_CHECK(kernels::cuda::LaunchEstimate(stream, shape, buffers));
      CUDA_CHECK(kernels::cuda::LaunchFinishNorms(stream, shape, buffers));
    };
    const auto recast_none = [&](cudaStream_t stream) {
      CUDA_CHECK(kernels::cuda::LaunchRecast(stream, shape, buffers));
    };
    const auto apply = [&](cudaStream_t stream) {
      CUDA_CHECK(kernels::cuda::LaunchApply(stream, shape, buffers));
    };
    CUDA_CHECK(kernels::cuda::LaunchEstimate(nullptr, shape, buffers));
    momentum(nullptr);
    CUDA_CHECK(kernels::cuda::LaunchFinishNorms(nullptr, shape, buffers));
    recast_none(nullptr);
    apply(nullptr);
    CUDA_CHECK(cudaDeviceSynchronize());
    if (recast.ToHost(0, 1)[0] != 0) ++wrong_;  // the estimate is near enough here
    const auto norm = norms.ToHost(0, 3);
    int64_t wrong_b = 0;
    int64_t wrong_x = 0;
    int64_t wrong_w = 0;
    AtBothEnds([&](int64_t first, int64_t n) {
      const auto hg = g.ToHost(first, n), hb = b.ToHost(first, n), hw = w.ToHost(first, n),
                 ob = b_out.ToHost(first, n), ow = w_out.ToHost(first, n);
      const auto hx = x.ToHost(first, n);
      for (int64_t i = 0; i < n; ++i) {
        const double gradient = hg[i] * s.gradient_factor;
        const double next = s.momentum * hb[i] + gradient;
        const double u = gradient + s.momentum * next;
        const double got_x = static_cast<float>(hx[i]);
        const double step = s.learning_rate * shape.update_scale / buffers.result_scale;
        if (!Near(ob[i], next)) ++wrong_b;
        if (!(std::fabs(got_x - norm[0] * u) <= 0x1p-10 * std::fabs(got_x) + 1e-6)) ++wrong_x;
        if (!(std::fabs(ow[i] - (hw[i] * (1 - s.learning_rate * s.weight_decay) - step * got_x)) <=
              1e-6)) {
          ++wrong_w;
        }
      }
      return 0;
    });
    // u has variance 0.25 (1.95)^2 + (0.95^2 * 3)^2
    const double rms = std::sqrt(0.25 * 1.95 * 1.95 + std::pow(0.95 * 0.95 * 3, 2));
    if (!(std::fabs(1.0 / (norm[1] * norm[0] * kRows) / rms - 1) < 1e-3)) ++wrong_b;
    Report("momentum, squares, cast", 14, wrong_b + wrong_x, momentum);
    Report("decay, update, master, cast", 12, wrong_w, apply);
    Report("estimate, norm", 8.0 / 512, 0, norms_of);
    Report("recast, nothing to do", 0, 0, recast_none);
    // Every matrix, as for a library's products.
    shape.normalise = 4096;
    Report("momentum, squares", 12, 0, momentum);
    Report("norm, normalised cast", 10, 0, [&](cudaStream_t stream) {
      norms_of(stream);
      recast_none(stream);
    });
  }

  const double warm_;
  const std::string json_;
  std::string name_;
  double copy_ = 0;
  int64_t wrong_ = 0;
  int wrong_rows_ = 0;
  std::ostringstream rows_;
  Nvml nvml_;
};

int Main(int argc, char** argv) {
  double warm = 1.0;
  std::string json;
  std::string command = argv[0];
  for (int i = 1; i < argc; ++i) command += std::string(" ") + argv[i];
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::string(argv[i]) == "-w") warm = std::atof(argv[i + 1]);
    if (std::string(argv[i]) == "-J") json = argv[i + 1];
  }
  Bench bench(warm, json);
  const int64_t wrong = bench.Run();
  bench.Finish(command);
  std::printf("# %s\n", wrong == 0 ? "all rows are right" : "WRONG RESULTS");
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace dmuond::bench

int main(int argc, char** argv) { return dmuond::bench::Main(argc, argv); }
