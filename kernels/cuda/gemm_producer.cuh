// The producer of a product's kernel, one thread: operands and addends through the copy engine into
// the ring, for a job after the other.
#ifndef DMUOND_KERNELS_CUDA_GEMM_PRODUCER_CUH_
#define DMUOND_KERNELS_CUDA_GEMM_PRODUCER_CUH_

#include "kernels/cuda/gemm_cta.cuh"

namespace dmuond::kernels::cuda {

template <int kTileN, GemmLayout kLayout>
struct GemmProducer : GemmCta<kTileN> {
  using Cta = GemmCta<kTileN>;
  using Cta::empty;
  using Cta::full;
  using Cta::Job;
  using Cta::kUnit;
  using Cta::Problem;
  using Cta::rank;
  using Cta::stages;
  using typename Cta::Position;
  using typename Cta::Traits;
  static constexpr bool kAIsMMajor = kLayout == GemmLayout::kTN;
  static constexpr bool kBIsNMajor = kLayout != GemmLayout::kNT;
  static constexpr int kBoxA = BoxA(kLayout, Traits::kSharing);
  static constexpr int kWide = WideBoxB(kLayout);

  // `count` rows (or, MN-major, columns) of an operand from `index` on, and 64 along k.
  template <bool kMnMajor, int kBox, bool kForPair>
  __device__ __forceinline__ static void LoadOperand(const CUtensorMap& map, uint32_t to,
                                                     uint32_t barrier, int k, int index, int count,
                                                     int batch) {
#pragma unroll 2
    for (int i = 0; i < count; i += kBox) {
      const int x = kMnMajor ? index + i : k;
      const int y = kMnMajor ? k : index + i;
      const uint32_t box = to + i * kTileK * 2;
      if constexpr (kForPair) {
        ptx::TensorLoadMulticast(box, &map, barrier, 3, x, y, batch);
      } else {
        ptx::TensorLoad(box, &map, barrier, x, y, batch);
      }
    }
  }

  // One stage of the ring: a step along k of both operands, or two.
  __device__ __forceinline__ void LoadStage(const DeviceProblem& problem, const GemmJob& job,
                                            int index, uint32_t stage) const {
    const int columns = job.width * kUnit;
    const uint32_t barrier = full + stage * 8;
    const uint32_t to = stages + stage * Traits::kStageBytes;
    if (job.doubled) {
      const uint32_t bytes = columns * kTileK * 2;
      ptx::BarrierArriveExpect(barrier, 2 * bytes);
      for (int half = 0; half < 2; ++half) {
        LoadOperand<kBIsNMajor, kUnit, false>(problem.b, to + kTileABytes + half * bytes, barrier,
                                              (index * 2 + half) * kTileK, job.col * kUnit, columns,
                                              job.batch);
      }
      return;
    }
    const int k = index * kTileK;
    const bool load_a = !job.a_in_b;
    ptx::BarrierArriveExpect(barrier, (load_a ? kTileABytes : 0) + columns * kTileK * 2);
    if (Traits::kSharing == PairSharing::kRows && job.paired) {
      // Half of A each, for both.
      const int offset = static_cast<int>(rank) * kBoxA;
      LoadOperand<kAIsMMajor, kBoxA, true>(problem.a, to + offset * kTileK * 2, barrier, k,
                                           job.row * kTileM + offset, kBoxA, job.batch);
    } else if (load_a) {
      LoadOperand<kAIsMMajor, kBoxA, false>(problem.a, to, barrier, k, job.row * kTileM, kTileM,
                                            job.batch);
    }
    LoadB(problem, job, k, to + kTileABytes, barrier);
  }

  __device__ __forceinline__ void LoadB(const DeviceProblem& problem, const GemmJob& job, int k,
                                        uint32_t to, uint32_t barrier) const {
    const int columns = job.width * kUnit;
    const int col = job.col * kUnit;
    if (kWide > kUnit && columns == 2 * kWide) {
      if (job.paired) {
        // A half each, for both.
        const int offset = static_cast<int>(rank) * kWide;
        LoadOperand<kBIsNMajor, kWide, true>(problem.b_wide, to + offset * kTileK * 2, barrier, k,
                                             col + offset, kWide, job.batch);
      } else {
        LoadOperand<kBIsNMajor, kWide, false>(problem.b_wide, to, barrier, k, col, columns,
                                              job.batch);
      }
    } else if (Traits::kSharing == PairSharing::kColumns && job.paired) {
      // Every other unit each, for both.
      for (int offset = static_cast<int>(rank) * kUnit; offset < columns; offset += 2 * kUnit) {
        LoadOperand<kBIsNMajor, kUnit, true>(problem.b, to + offset * kTileK * 2, barrier, k,
                                             col + offset, kUnit, job.batch);
      }
    } else {
      LoadOperand<kBIsNMajor, kUnit, false>(problem.b, to, barrier, k, col, columns, job.batch);
    }
  }

  // One stage of the ring: up to two chunks of an addend, or nothing but the room for them.
  __device__ __forceinline__ void LoadAddend(const CUtensorMap& map, bool exists,
                                             const GemmJob& job, int first_chunk,
                                             uint32_t stage) const {
    const uint32_t barrier = full + stage * 8;
    const uint32_t to = stages + stage * Traits::kStageBytes;
    const int chunks = min(2, job.width - first_chunk);
    ptx::BarrierArriveExpect(barrier, exists ? chunks * 2 * kBoxBytes : 0);
    if (!exists) return;
    const int col = job.col * kUnit + first_chunk * 64;
    for (int i = 0; i < chunks * 2; ++i) {
      ptx::TensorLoad(to + i * kBoxBytes, &map, barrier, col + i / 2 * 64,
                      job.row * kTileM + i % 2 * 64, job.batch);
    }
  }

  __device__ void Produce() const {
    Position at;
    GemmJob job = Job(0);
    if (job.width != 0) {
      const DeviceProblem& problem = Problem(job.problem);
      ptx::PrefetchTensorMap(&problem.a);
      ptx::PrefetchTensorMap(&problem.b);
      ptx::PrefetchTensorMap(&problem.b_wide);
      ptx::PrefetchTensorMap(&problem.d);
      if (job.has_c) ptx::PrefetchTensorMap(&problem.c);
    }
    ptx::WaitForPrevious();
    const auto next_stage = [&] {
      ptx::BarrierWait(empty + at.stage * 8, at.parity ^ 1);
      const uint32_t stage = at.stage;
      at.Advance();
      return stage;
    };
    for (int turn = 1; job.width != 0; ++turn) {
      const DeviceProblem& problem = Problem(job.problem);
      for (int i = 0; i < job.stages; ++i) LoadStage(problem, job, i, next_stage());
      // Not before: it would be waited for (registers are few here) before the first loads.
      const GemmJob next = Job(turn);
      for (int chunk = 0; chunk < job.width; chunk += 2) {
        if (job.has_c2) LoadAddend(problem.c2, true, job, chunk, next_stage());
        LoadAddend(problem.c, job.has_c, job, chunk, next_stage());
      }
      job = next;
    }
    // Not before: where two branches of a graph share the chip, CTAs of the next product would take
    // multiprocessors from the other branch to wait for this one's end.
    ptx::LaunchDependents();
    // The pair's last arrivals at this CTA's barriers must find it: no CTA ends before them.
    for (int i = 0; i < Traits::kStages; ++i) next_stage();
  }
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_GEMM_PRODUCER_CUH_
