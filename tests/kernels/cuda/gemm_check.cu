// Checks of kernels/cuda/gemm.h on the GPU, without a framework. Prints a row per case, exits
// non-zero if any is wrong. Rules: docs/maths.md, "How to know that it is right".
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "bench/cuda/harness.cuh"
#include "kernels/cuda/gemm.h"

namespace dmuond::bench {
namespace {

using kernels::cuda::Gemm;
using kernels::cuda::GemmLayout;
using kernels::cuda::GemmOptions;
using kernels::cuda::GemmProblem;
using kernels::cuda::GemmTile;
using kernels::cuda::GemmType;
using kernels::cuda::MatrixView;

struct Case {
  GemmLayout layout;
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t batch;
  bool symmetric;  // NT and m == n == k: two different symmetric matrices; else A * A'
  bool addends;
  Fill fill;
};

int64_t RoundUp(int64_t x) { return (x + 7) / 8 * 8; }

template <typename T>
struct Matrices {
  Matrices(int64_t rows_in, int64_t cols_in, int64_t batch_in)
      : rows(rows_in),
        cols(cols_in),
        ld(RoundUp(cols_in)),
        stride(rows_in * ld),
        batch(batch_in),
        buffer(stride * batch_in) {}
  MatrixView View(int64_t first = 0) const {
    return {buffer.get() + first * stride, rows, cols, ld, stride};
  }
  int64_t rows, cols, ld, stride, batch;
  Buffer<T> buffer;
};

// Padding columns hold NaN in every input; a kernel must not let them in. (The copy engine never
// reads them: they lie outside the tensor map.)
template <typename T>
int64_t RunCase(const Case& c) {
  const bool ta = c.layout == GemmLayout::kTN;
  const bool tb = c.layout == GemmLayout::kNT;
  const bool gram = c.symmetric && !(c.m == c.k && tb);
  Matrices<T> a(ta ? c.k : c.m, ta ? c.m : c.k, c.batch);
  Matrices<T> b(tb ? c.n : c.k, tb ? c.k : c.n, c.batch);
  Matrices<T> addend(c.m, c.n, c.batch);
  Matrices<T> addend2(c.m, c.n, c.batch);
  Matrices<T> d(c.m, c.n, c.batch);
  Matrices<T> again(c.m, c.n, c.batch);
  const float scale = 1.0F / std::sqrt(static_cast<float>(c.k));
  const bool both = c.symmetric && !gram;
  const auto fill = [&](Matrices<T>& x, uint64_t seed, bool symmetric, float s) {
    FillRandom(x.buffer.get(), x.rows, x.cols, x.ld, x.stride, c.batch, seed, symmetric, c.fill, s);
  };
  fill(a, 1, both, scale);
  fill(b, gram ? 1 : 2, both, 1.0F);
  fill(addend, 3, c.symmetric, 1.0F);
  fill(addend2, 4, c.symmetric, 1.0F);
  // Symmetric operands and addends of which no more is there than the lower form.
  Matrices<T> lower_a(a.rows, a.cols, both ? c.batch : 0);
  Matrices<T> lower_b(b.rows, b.cols, both ? c.batch : 0);
  Matrices<T> lower_addend(c.m, c.n, c.symmetric ? c.batch : 0);
  Matrices<T> lower_addend2(c.m, c.n, c.symmetric ? c.batch : 0);
  const auto take_lower = [&](const Matrices<T>& from, const Matrices<T>& to) {
    if (to.batch == 0) return;
    CUDA_CHECK(cudaMemcpy(to.buffer.get(), from.buffer.get(), from.stride * c.batch * sizeof(T),
                          cudaMemcpyDeviceToDevice));
    ToLowerForm(to.buffer.get(), to.rows, to.ld, to.stride, c.batch);
  };
  take_lower(a, lower_a);
  take_lower(b, lower_b);
  take_lower(addend, lower_addend);
  take_lower(addend2, lower_addend2);

  std::vector<float> host_scalars(3 * c.batch);
  const bool integers = c.fill == Fill::kSmallIntegers;
  for (int64_t z = 0; z < c.batch; ++z) {
    host_scalars[z] = integers ? 1.0F : 0.5F + 0.25F * static_cast<float>(z % 7);
    host_scalars[c.batch + z] = integers ? -1.0F : 1.0F - 0.125F * static_cast<float>(z % 5);
    host_scalars[2 * c.batch + z] = integers ? 2.0F : 0.75F;
  }
  Buffer<float> scalars(host_scalars.size());
  CUDA_CHECK(cudaMemcpy(scalars.get(), host_scalars.data(), host_scalars.size() * sizeof(float),
                        cudaMemcpyHostToDevice));
  const float diagonal = !c.symmetric ? 0.0F : integers ? 3.0F : 1.625F;

  const auto problem = [&](int64_t first, int64_t batch, const Matrices<T>& out) {
    GemmProblem p;
    p.a = a.View(first);
    p.b = gram ? a.View(first) : b.View(first);
    if (c.addends) {
      p.c = addend.View(first);
      p.c2 = addend2.View(first);
      p.beta = {scalars.get() + c.batch + first, 1};
      p.beta2 = {scalars.get() + 2 * c.batch + first, 1};
      p.diagonal = diagonal;
    }
    p.d = out.View(first);
    p.batch = batch;
    p.symmetric = c.symmetric;
    p.alpha = {scalars.get() + first, 1};
    return p;
  };
  // One matrix in three is compared with fp64.
  const int64_t compared = std::max<int64_t>(1, c.batch / 3);
  std::vector<std::unique_ptr<Buffer<double>>> references;
  for (int64_t z = 0; z < c.batch; z += compared) {
    references.push_back(std::make_unique<Buffer<double>>(c.m * c.n));
    const T* from_b = gram ? a.buffer.get() : b.buffer.get();
    const int64_t b_ld = gram ? a.ld : b.ld;
    const int64_t b_stride = gram ? a.stride : b.stride;
    const bool b_is_n_by_k = tb;
    const dim3 grid(static_cast<unsigned>((c.n + 63) / 64), static_cast<unsigned>((c.m + 63) / 64));
    ReferenceProduct<T><<<grid, 256>>>(
        references.back()->get(), a.buffer.get() + z * a.stride, from_b + z * b_stride,
        c.addends ? addend.buffer.get() + z * addend.stride : nullptr,
        c.addends ? addend2.buffer.get() + z * addend2.stride : nullptr, c.m, c.n, c.k,
        ta ? 1 : a.ld, ta ? a.ld : 1, b_is_n_by_k ? 1 : b_ld, b_is_n_by_k ? b_ld : 1, addend.ld,
        host_scalars[z], c.addends ? host_scalars[c.batch + z] : 0,
        c.addends ? host_scalars[2 * c.batch + z] : 0, c.addends ? diagonal : 0);
    CUDA_CHECK(cudaGetLastError());
  }

  const auto run_tile = [&](GemmTile tile) -> int64_t {
    GemmOptions options;
    options.type = std::is_same_v<T, __half> ? GemmType::kF16 : GemmType::kBF16;
    options.layout = c.layout;
    options.tile = tile;
    std::string error;
    const GemmProblem whole = problem(0, c.batch, d);
    const auto gemm = Gemm::Create({&whole, 1}, options, &error);
    if (gemm == nullptr) {
      std::printf("# %s\n", error.c_str());
      return 1;
    }
    d.buffer.Fill(0xFF);
    CUDA_CHECK(gemm->Launch(nullptr));
    CUDA_CHECK(cudaDeviceSynchronize());

    // The same matrices one by one as problems of one launch: same bits.
    again.buffer.Fill(0xFF);
    std::vector<GemmProblem> singles;
    for (int64_t z = 0; z < c.batch; ++z) singles.push_back(problem(z, 1, again));
    const auto grouped = Gemm::Create(singles, options, &error);
    if (grouped == nullptr) {
      std::printf("# %s\n", error.c_str());
      return 1;
    }
    CUDA_CHECK(grouped->Launch(nullptr));
    CUDA_CHECK(cudaDeviceSynchronize());
    int64_t changed = DifferentBits(d.buffer.get(), again.buffer.get(), d.stride * c.batch);
    // And in every run, and with the other tile.
    for (int run = 0; run < 3; ++run) {
      again.buffer.Fill(run % 2 == 0 ? 0x55 : 0xFF);
      const GemmProblem p = problem(0, c.batch, again);
      GemmOptions other = options;
      if (run == 1) other.tile = tile == GemmTile::k256 ? GemmTile::k128 : GemmTile::k256;
      const auto repeat = Gemm::Create({&p, 1}, other, &error);
      CUDA_CHECK(repeat->Launch(nullptr));
      CUDA_CHECK(repeat->Launch(nullptr, true));
      CUDA_CHECK(cudaDeviceSynchronize());
      if (c.n % 8 == 0) {
        changed += DifferentBits(d.buffer.get(), again.buffer.get(), d.stride * c.batch);
      }
    }

    // And in the lower form.
    if (c.symmetric) {
      GemmProblem p = problem(0, c.batch, again);
      GemmOptions of_lower = options;
      if (both) of_lower.layout = GemmLayout::kSS;
      if (ReadsLower(tile, of_lower.layout)) {
        p.a = lower_a.View();
        p.b = lower_b.View();
      }
      if (c.addends) {
        p.c = lower_addend.View();
        p.c2 = lower_addend2.View();
      }
      p.store_lower = true;
      again.buffer.Fill(0xFF);
      const auto lower = Gemm::Create({&p, 1}, of_lower, &error);
      if (lower == nullptr) {
        std::printf("# %s\n", error.c_str());
        return 1;
      }
      CUDA_CHECK(lower->Launch(nullptr));
      CUDA_CHECK(cudaDeviceSynchronize());
      changed += FromLowerForm(again.buffer.get(), c.n, again.ld, again.stride, c.batch);
      if (c.n % 8 == 0) {
        changed += DifferentBits(d.buffer.get(), again.buffer.get(), d.stride * c.batch);
      }
    }

    Comparison worst;
    for (int64_t z = 0; z < c.batch; z += compared) {
      // Sums of small integers are exact in fp32: only the last rounding is left.
      const double relative =
          (std::is_same_v<T, __half> ? 0x1p-11 : 0x1p-8) * (integers ? 1 : 1.02);
      const Comparison r =
          Compare(d.buffer.get() + z * d.stride, d.ld, references[z / compared]->get(), c.m, c.n,
                  c.symmetric, relative, integers ? 0 : 1e-3);
      worst.error = std::max(worst.error, r.error);
      worst.wrong += r.wrong;
      worst.asymmetric += r.asymmetric;
    }
    const char* names[] = {"", "NT", "NN", "TN"};
    const int64_t wrong = worst.wrong + worst.asymmetric + changed;
    std::printf(" %-5s %-3s %5s %6ld %6ld %6ld %5ld %4s %4s %4s %10.2e %8ld %8ld %8ld\n",
                std::is_same_v<T, __half> ? "f16" : "bf16", names[static_cast<int>(c.layout)],
                Name(tile), c.m, c.n, c.k, c.batch, c.symmetric ? "yes" : "no",
                c.addends ? "yes" : "no", integers ? "int" : "rand", worst.error, worst.wrong,
                worst.asymmetric, changed);
    std::fflush(stdout);
    return wrong;
  };
  int64_t wrong = 0;
  for (const GemmTile tile : kernels::cuda::kGemmTiles) wrong += run_tile(tile);
  return wrong;
}

__global__ void Nothing() {}

// Products that are launched as soon as they are made, and in long rows of overlapping launches, in
// a stream that the default stream does not order: as the tuner of tiles does. So small that CTAs
// end while others of their kind, of another kind, or of other kernels begin. Same bits as alone.
int64_t RunInHaste(int64_t n, int64_t batch, int rounds, int launches) {
  Matrices<__half> x(n, n, batch);
  Matrices<__half> alone(n, n, batch);
  Matrices<__half> d(n, n, batch);
  FillRandom(x.buffer.get(), n, n, x.ld, x.stride, batch, 5, true, Fill::kNormal, 0.1F);
  alone.buffer.Fill(0xFF);
  CUDA_CHECK(cudaDeviceSynchronize());
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  GemmProblem p;
  p.a = p.b = p.c = x.View();
  p.d = alone.View();
  p.batch = batch;
  p.symmetric = true;
  p.beta = {nullptr, 0.5F};
  std::string error;
  const auto reference = Gemm::Create({&p, 1}, {}, &error);
  CUDA_CHECK(reference->Launch(stream));
  CUDA_CHECK(cudaStreamSynchronize(stream));
  p.d = d.View();
  int64_t wrong = 0;
  for (int round = 0; round < rounds; ++round) {
    d.buffer.Fill(0xFF);
    CUDA_CHECK(cudaDeviceSynchronize());
    std::unique_ptr<Gemm> last;
    for (const GemmTile tile : kernels::cuda::kGemmTiles) {
      GemmOptions options;
      options.tile = tile;
      auto gemm = Gemm::Create({&p, 1}, options, &error);
      for (int i = 0; i < launches; ++i) {
        CUDA_CHECK(gemm->Launch(stream, i > 0));
        if (last != nullptr && i % 2 == 0) CUDA_CHECK(last->Launch(stream, true));
        if (i % 8 == 0) Nothing<<<1056, 64, 0, stream>>>();
      }
      CUDA_CHECK(cudaGetLastError());
      CUDA_CHECK(cudaStreamSynchronize(stream));
      wrong += DifferentBits(d.buffer.get(), alone.buffer.get(), d.stride * batch);
      last = std::move(gemm);
    }
  }
  CUDA_CHECK(cudaStreamDestroy(stream));
  std::printf(" in haste: %ld of %ld x %ld, %d rounds: %ld elements differ\n",
              static_cast<long>(batch), static_cast<long>(n), static_cast<long>(n), rounds,
              static_cast<long>(wrong));
  return wrong;
}

int Main(int argc, char** argv) {
  const bool brief = argc > 1 && std::string(argv[1]) == "--brief";  // for compute-sanitizer
  std::printf(
      "#type  lay  tile      m      n      k batch symm  add fill      error   #wrong  #asymm"
      "  #change\n");
  const GemmLayout nt = GemmLayout::kNT;
  const GemmLayout nn = GemmLayout::kNN;
  const GemmLayout tn = GemmLayout::kTN;
  std::vector<Case> cases;
  const Fill rand = Fill::kNormal;
  const Fill ints = Fill::kSmallIntegers;
  for (const int64_t n : brief ? std::vector<int64_t>{200}
                               : std::vector<int64_t>{8, 40, 64, 72, 128, 136, 192, 200, 250, 256,
                                                      264, 320, 384, 511, 512, 1000, 1024, 2568}) {
    const int64_t batch = n <= 256 ? 5 : 3;
    cases.push_back({nt, n, n, n, batch, true, true, rand});
    cases.push_back({nt, n, n, n, batch, true, true, ints});
    cases.push_back({nt, n, n, RoundUp(3 * n + 5), batch, true, false, rand});
    cases.push_back({tn, n, n, RoundUp(2 * n + 5), batch, true, true, rand});
    cases.push_back({nn, n, RoundUp(2 * n + 5), n, batch, false, true, rand});
    cases.push_back({nt, RoundUp(2 * n + 5), n, n, batch, false, true, ints});
    cases.push_back({tn, n, RoundUp(n / 2 + 3), n + 64, batch, false, false, ints});
  }
  // Tiles of the diagonal with guests.
  cases.push_back({nt, 2048, 2048, 128, 1, true, true, rand});
  if (!brief) {
    cases.push_back({nt, 2048, 2048, 512, 1, true, false, ints});
    cases.push_back({tn, 2048, 2048, 100, 1, true, true, rand});
    cases.push_back({nt, 2040, 2040, 200, 1, true, true, rand});
    cases.push_back({nt, 1, 1, 1, 3, true, true, rand});
    cases.push_back({nt, 1, 1, 777, 3, true, false, rand});
    cases.push_back({nn, 1, 4096, 1, 1, false, true, rand});
    cases.push_back({nt, 512, 512, 512, 56, true, true, rand});
    cases.push_back({nt, 256, 256, 256, 64, true, true, ints});
    cases.push_back({nt, 4096, 4096, 4096, 1, true, true, rand});
    cases.push_back({nn, 513, 511, 513, 2, false, true, rand});
    cases.push_back({tn, 511, 511, 513, 2, true, true, rand});
  }
  int64_t wrong = 0;
  for (const Case& c : cases) {
    wrong += RunCase<__half>(c);
    if (!brief) wrong += RunCase<__nv_bfloat16>(c);
  }
  if (brief) wrong += RunInHaste(256, 3, 1, 4);
  for (const int64_t n : brief ? std::vector<int64_t>{} : std::vector<int64_t>{64, 256, 1024}) {
    for (const int64_t batch : {1, 2, 3, 21}) wrong += RunInHaste(n, batch, 20, 64);
  }
  std::printf("# %s\n", wrong == 0 ? "all right" : "WRONG RESULTS");
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace dmuond::bench

int main(int argc, char** argv) { return dmuond::bench::Main(argc, argv); }
