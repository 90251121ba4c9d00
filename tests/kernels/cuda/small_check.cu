// Checks of kernels/cuda/small_products.h on the GPU, without a framework: a Newton-Schulz program
// in few launches has the bits of one launch a product (which muon_check compares with fp64), for
// any batch, in every run. Prints a row per case, exits non-zero if any is wrong.
//   small_check [--brief | --rounds | --time SECONDS | ROWSxCOLS:BATCH[:RUNS]]
// --time: also both versions' time, us per matrix, after that long of the same launches.
// --brief: for compute-sanitizer, the least that goes through every part; --rounds: of that the
// rounds alone, whose results are not looked at.
#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/cuda/harness.cuh"
#include "bench/cuda/newton_schulz_reference.cuh"
#include "kernels/cuda/newton_schulz.h"

namespace dmuond::bench {
namespace {

using kernels::NewtonSchulzForm;
using kernels::NewtonSchulzProgram;
using kernels::cuda::NewtonSchulz;
using kernels::cuda::NewtonSchulzOptions;
using kernels::cuda::SmallRounds;

struct Case {
  int64_t rows;
  int64_t cols;
  int64_t batch;
  std::vector<int> restarts;
  NewtonSchulzForm form;
};

// One Newton-Schulz of a batch on `x`, with NaN in the padding and poison in the workspace.
struct Run {
  Run(const NewtonSchulzProgram& program, int64_t batch, const float* norms, bool small)
      : workspace(NewtonSchulz::WorkspaceBytes(program, batch, kernels::ProductEngine::kOwn)) {
    workspace.Fill(0xFF);
    NewtonSchulzOptions options;
    options.small_rounds = small ? SmallRounds::kWherePossible : SmallRounds::kNever;
    std::string error;
    newton_schulz = NewtonSchulz::Create(program, batch, {norms, norms + batch}, workspace.get(),
                                         options, &error);
    if (newton_schulz == nullptr) std::printf("# %s\n", error.c_str());
  }
  void Launch(const __half* x, int64_t elements) const {
    CUDA_CHECK(cudaMemcpyAsync(newton_schulz->input(), x, elements * sizeof(__half),
                               cudaMemcpyDeviceToDevice, nullptr));
    CUDA_CHECK(newton_schulz->Launch(nullptr));
    CUDA_CHECK(cudaDeviceSynchronize());
  }
  const __half* result() const { return static_cast<const __half*>(newton_schulz->result()); }

  Buffer<uint8_t> workspace;
  std::unique_ptr<NewtonSchulz> newton_schulz;
};

// NaN in what lies beyond the columns of a row.
int64_t NotFinite(const __half* values, int64_t rows, int64_t cols, int64_t ld, int64_t batch) {
  std::vector<__half> host(rows * ld * batch);
  CUDA_CHECK(cudaMemcpy(host.data(), values, host.size() * sizeof(__half), cudaMemcpyDeviceToHost));
  int64_t wrong = 0;
  for (size_t i = 0; i < host.size(); ++i) {
    const bool inside = static_cast<int64_t>(i % ld) < cols;
    if (inside && !std::isfinite(static_cast<float>(host[i]))) ++wrong;
  }
  return wrong;
}

// `seconds`: 0 to time nothing. `runs`: how often the bits must be the same; 0: nor the last
// matrix's alone; below: rounds alone.
int64_t RunCase(const Case& c, double seconds, int runs) {
  kernels::NewtonSchulzConfig config = PresetConfig("dmuon").newton_schulz;
  config.restarts = c.restarts;
  config.form = c.form;
  const NewtonSchulzProgram program = *kernels::BuildNewtonSchulz(config, c.rows, c.cols);
  const int64_t ld = NewtonSchulz::LeadingDimension(c.cols);
  const int64_t stride = c.rows * ld;
  Buffer<__half> x(stride * c.batch);
  FillRandom(x.get(), c.rows, c.cols, ld, stride, c.batch, 31, false, Fill::kNormal, 1.0F);
  // 1 / norm and its square. One of the matrices has none.
  std::vector<float> norms(2 * c.batch);
  const std::vector<__half> host = x.ToHost(0, stride * c.batch);
  for (int64_t z = 0; z < c.batch; ++z) {
    double squares = 0;
    for (int64_t i = 0; i < stride; ++i) {
      const auto value = static_cast<double>(static_cast<float>(host[z * stride + i]));
      if (i % ld < c.cols) squares += value * value;
    }
    norms[z] = z == 2 ? 0 : static_cast<float>(1 / std::sqrt(squares));
    norms[c.batch + z] = norms[z] * norms[z];
  }
  Buffer<float> device_norms(norms.size());
  CUDA_CHECK(cudaMemcpy(device_norms.get(), norms.data(), norms.size() * sizeof(float),
                        cudaMemcpyHostToDevice));
  const Run small(program, c.batch, device_norms.get(), true);
  if (runs < 0) {
    if (small.newton_schulz == nullptr) return 1;
    small.Launch(x.get(), stride * c.batch);
    std::printf(" %6ld %6ld\n", static_cast<long>(c.rows), static_cast<long>(c.cols));
    return 0;
  }
  const Run single(program, c.batch, device_norms.get(), false);
  if (single.newton_schulz == nullptr || small.newton_schulz == nullptr) return 1;
  single.Launch(x.get(), stride * c.batch);
  small.Launch(x.get(), stride * c.batch);
  // Padding columns are never written: compare what lies between them.
  const auto different = [&](const __half* a, const __half* b, int64_t matrices) {
    if (ld == c.cols) return DifferentBits(a, b, stride * matrices);
    int64_t count = 0;
    for (int64_t r = 0; r < c.rows * matrices; ++r) {
      count += DifferentBits(a + r * ld, b + r * ld, c.cols);
    }
    return count;
  };
  const int64_t wrong = different(single.result(), small.result(), c.batch) +
                        NotFinite(small.result(), c.rows, c.cols, ld, c.batch);
  // Every run, and the last matrix alone.
  int64_t changed = 0;
  Buffer<__half> first(stride * c.batch);
  CUDA_CHECK(cudaMemcpy(first.get(), small.result(), stride * c.batch * sizeof(__half),
                        cudaMemcpyDeviceToDevice));
  for (int run = 0; run < runs; ++run) {
    small.Launch(x.get(), stride * c.batch);
    changed += different(first.get(), small.result(), c.batch);
  }
  if (runs > 0) {
    const std::vector<float> last = {norms[c.batch - 1], norms[2 * c.batch - 1]};
    Buffer<float> last_norms(2);
    CUDA_CHECK(
        cudaMemcpy(last_norms.get(), last.data(), 2 * sizeof(float), cudaMemcpyHostToDevice));
    const Run alone(program, 1, last_norms.get(), true);
    alone.Launch(x.get() + (c.batch - 1) * stride, stride);
    changed += different(first.get() + (c.batch - 1) * stride, alone.result(), 1);
  }
  std::string restarts;
  for (const int r : c.restarts) restarts += (restarts.empty() ? "" : ",") + std::to_string(r);
  std::printf(" %6ld %6ld %6ld %-9s %-8s %8ld %8ld", static_cast<long>(c.rows),
              static_cast<long>(c.cols), static_cast<long>(c.batch),
              c.form == NewtonSchulzForm::kGram ? "gram" : "standard", restarts.c_str(),
              static_cast<long>(wrong), static_cast<long>(changed));
  if (seconds > 0) {
    static const Nvml nvml;
    const auto matrix_us = [&](const Run& run) {
      // The products destroy X: each run copies it anew.
      const auto copy = [&](cudaStream_t stream) {
        CUDA_CHECK(cudaMemcpyAsync(run.newton_schulz->input(), x.get(),
                                   stride * c.batch * sizeof(__half), cudaMemcpyDeviceToDevice,
                                   stream));
      };
      const Timing copying = TimeSustained(copy, seconds / 4, nvml);
      const Timing whole = TimeSustained(
          [&](cudaStream_t stream) {
            copy(stream);
            CUDA_CHECK(run.newton_schulz->Launch(stream));
          },
          seconds, nvml);
      return (whole.p50_us - copying.p50_us) / static_cast<double>(c.batch);
    };
    std::printf(" %10.2f", matrix_us(single));
    std::printf(" %10.2f", matrix_us(small));
  }
  std::printf("\n");
  std::fflush(stdout);
  return wrong + changed;
}

std::vector<Case> BriefCases() {
  const NewtonSchulzForm gram = NewtonSchulzForm::kGram;
  return {{100, 150, 1, {2}, gram},
          {160, 136, 1, {}, NewtonSchulzForm::kStandard},
          {200, 300, 1, {2}, gram},
          {600, 250, 1, {2}, gram}};
}

std::vector<Case> CheckedCases() {
  std::vector<Case> cases;
  const NewtonSchulzForm gram = NewtonSchulzForm::kGram;
  for (const int64_t p : {1, 8, 33, 64, 65, 100, 128, 129, 160, 192, 193, 200, 250, 255, 256}) {
    cases.push_back({p, p + 77, 3, {2}, gram});
    cases.push_back({3 * p, p, 3, {2}, gram});
    cases.push_back({p, p, 5, {2}, gram});
    cases.push_back({p, 5 * p + 3, 3, {2, 4}, gram});
    cases.push_back({p, 2 * p, 3, {3}, gram});
    cases.push_back({2 * p, p, 3, {}, NewtonSchulzForm::kStandard});
    cases.push_back({p, 20, 3, {}, NewtonSchulzForm::kStandard});
  }
  cases.push_back({256, 1536, 56, {2}, gram});
  cases.push_back({1536, 256, 56, {2}, gram});
  cases.push_back({1536, 256, 132, {2}, gram});
  cases.push_back({256, 1024, 150, {2}, gram});
  cases.push_back({192, 1024, 150, {2}, gram});
  cases.push_back({128, 1024, 300, {2}, gram});
  cases.push_back({64, 16384, 8, {2}, gram});
  return cases;
}

std::vector<Case> TimedCases() {
  std::vector<Case> cases;
  const NewtonSchulzForm gram = NewtonSchulzForm::kGram;
  for (const int64_t batch : {4, 8, 14, 28, 42, 56, 66, 67, 100, 132, 200}) {
    cases.push_back({256, 1536, batch, {2}, gram});
  }
  for (const int64_t batch : {8, 28, 56, 132}) {
    cases.push_back({1536, 256, batch, {2}, gram});
    cases.push_back({256, 256, batch, {}, NewtonSchulzForm::kStandard});
    cases.push_back({256, 6144, batch, {2}, gram});
    cases.push_back({192, 1024, batch, {2}, gram});
    cases.push_back({128, 1024, batch, {2}, gram});
    cases.push_back({64, 1024, batch, {2}, gram});
  }
  return cases;
}

int Main(int argc, char** argv) {
  const std::string first = argc > 1 ? argv[1] : "";
  const double seconds = first == "--time" && argc > 2 ? std::atof(argv[2]) : 0;
  const bool rounds = first == "--rounds";
  const bool brief = first == "--brief" || rounds;
  std::vector<Case> cases = brief ? BriefCases() : seconds > 0 ? TimedCases() : CheckedCases();
  int runs = rounds ? -1 : brief ? 0 : 3;
  if (Case one{1, 1, 1, {2}, NewtonSchulzForm::kGram};
      std::sscanf(first.c_str(), "%ldx%ld:%ld:%d", &one.rows, &one.cols, &one.batch, &runs) >= 3) {
    cases = {one};
  }
  std::printf("#  rows   cols  batch form      restarts   #wrong  #change%s\n",
              seconds > 0 ? "  single(us) rounds(us)" : "");
  int64_t wrong = 0;
  for (const Case& c : cases) wrong += RunCase(c, seconds, runs);
  std::printf("# %s\n", wrong == 0 ? "all right" : "WRONG RESULTS");
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace dmuond::bench

int main(int argc, char** argv) { return dmuond::bench::Main(argc, argv); }
