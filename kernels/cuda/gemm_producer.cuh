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
  using Cta::params;
  using Cta::Problem;
  using Cta::rank;
  using Cta::stages;
  using typename Cta::Position;
  using typename Cta::Traits;
  static constexpr bool kAIsMMajor = kLayout == GemmLayout::kTN;
  static constexpr bool kBIsNMajor = kLayout == GemmLayout::kNN || kLayout == GemmLayout::kTN;
  static constexpr int kBoxA = BoxA(kLayout, Traits::kSharing);
  static constexpr bool kReadsLower = kLayout == GemmLayout::kSS;
  static constexpr bool kHasWide = kLayout == GemmLayout::kNT && kTileN == 256;

  // The next stage, when both CTAs' consumers have given it back.
  __device__ __forceinline__ uint32_t NextStage(Position& at) const {
    ptx::BarrierWait(empty + at.stage * 8, at.parity ^ 1);
    const uint32_t stage = at.stage;
    at.Advance();
    return stage;
  }

  // All rows of a tile's A, and 64 along k.
  __device__ __forceinline__ static void LoadA(const DeviceProblem& problem, uint32_t to,
                                               uint32_t barrier, int k, int row, int batch) {
#pragma unroll
    for (int i = 0; i < kTileM; i += kBoxA) {
      ptx::TensorLoad(to + i * kTileK * 2, &problem.a, barrier, kAIsMMajor ? row + i : k,
                      kAIsMMajor ? k : row + i, batch);
    }
  }

  // Stages of the ring, one after the other: `load` issues the loads of one, of `bytes` in all, for
  // (first step along k, address, barrier).
  template <typename Load>
  __device__ __forceinline__ void LoadStages(const GemmJob& job, Position& at, int steps,
                                             uint32_t bytes, const Load& load) const {
    LoadStages(at, 0, job.stages * steps * kTileK, steps, bytes, load);
  }
  template <typename Load>
  __device__ __forceinline__ void LoadStages(Position& at, int begin, int end, int steps,
                                             uint32_t bytes, const Load& load) const {
    for (int k = begin; k < end; k += steps * kTileK) {
      const uint32_t stage = NextStage(at);
      const uint32_t barrier = full + stage * 8;
      ptx::BarrierArriveExpect(barrier, bytes);
      load(k, stages + stage * Traits::kStageBytes, barrier);
    }
  }

  // As LoadOperands(), of what lies right of the diagonal from the other side of it: the block of
  // 64 x 64 there has rows along k.
  __device__ __forceinline__ void LoadLower(const DeviceProblem& problem, const GemmJob& job,
                                            Position& at) const {
    const auto turns = Cta::TurnsOf(job);
    const int steps = job.doubled ? 2 : 1;
    const int columns = job.width * kUnit;
    const uint32_t bytes_b = columns * kTileK * 2;
    const int row = job.row * kTileM;
    const int col = job.col * kUnit;
    const int batch = job.batch;
    const bool wide = columns == 2 * params.wide_b;
    const CUtensorMap& map_b = wide ? problem.b_wide : problem.b;
    const int box_b = wide ? params.wide_b : kUnit;
    const int half = static_cast<int>(rank);
    const auto load_a = [&](int k, uint32_t to, uint32_t barrier, bool turned) {
      if (job.a_in_b) return;
      if (!turned) return LoadA(problem, to, barrier, k, row, batch);
      ptx::TensorLoad(to, &problem.a_block, barrier, row, k, batch);
      ptx::TensorLoad(to + kBoxBytes, &problem.a_block, barrier, row + 64, k, batch);
    };
    const auto load_b = [&](int k, uint32_t to, uint32_t barrier, bool turned) {
      const CUtensorMap& map = turned ? problem.b : map_b;
      const int box = turned ? kUnit : box_b;
      const int first = job.paired ? half * box : 0;
      const int step = job.paired ? 2 * box : box;
      for (int i = first; i < columns; i += step) {
        const int x = turned ? col + i : k;
        const int y = turned ? k : col + i;
        if (job.paired) {
          ptx::TensorLoadMulticast(to + i * kTileK * 2, &map, barrier, 3, x, y, batch);
        } else {
          ptx::TensorLoad(to + i * kTileK * 2, &map, barrier, x, y, batch);
        }
      }
    };
    const auto load = [&](int begin, int end, bool a_turned, bool b_turned) {
      const uint32_t bytes = steps * bytes_b + (job.a_in_b ? 0 : kTileABytes);
      LoadStages(at, begin * kTileK, end * kTileK, steps, bytes,
                 [&](int k, uint32_t to, uint32_t barrier) {
                   load_a(k, to, barrier, a_turned);
                   load_b(k, to + kTileABytes, barrier, b_turned);
                   if (steps == 2) {
                     load_b(k + kTileK, to + kTileABytes + bytes_b, barrier, b_turned);
                   }
                 });
    };
    load(0, turns.b, false, false);
    load(turns.b, turns.a, false, true);
    load(turns.a, job.stages * steps, true, true);
  }

  // A tile's operands. What kind of tile it is, is asked once, not at every stage: from a stage's
  // release to its next loads it waits for instructions.
  __device__ __forceinline__ void LoadOperands(const DeviceProblem& problem, const GemmJob& job,
                                               Position& at) const {
    const int columns = kTileN == kUnit ? kUnit : job.width * kUnit;
    const uint32_t bytes_b = columns * kTileK * 2;
    const uint32_t bytes = kTileABytes + bytes_b;
    const int row = job.row * kTileM;
    const int col = job.col * kUnit;
    const int batch = job.batch;
    const int half = static_cast<int>(rank);
    const bool wide = kHasWide && columns == 2 * params.wide_b;
    const CUtensorMap& map_b = wide ? problem.b_wide : problem.b;
    const int box_b = wide ? params.wide_b : kUnit;
    const auto load_b = [&](int k, uint32_t to, uint32_t barrier) {
      for (int i = 0; i < columns; i += box_b) {
        ptx::TensorLoad(to + i * kTileK * 2, &map_b, barrier, kBIsNMajor ? col + i : k,
                        kBIsNMajor ? k : col + i, batch);
      }
    };
    if (kTileN == 256 && job.doubled) {
      LoadStages(job, at, 2, 2 * bytes_b, [&](int k, uint32_t to, uint32_t barrier) {
        load_b(k, to + kTileABytes, barrier);
        load_b(k + kTileK, to + kTileABytes + bytes_b, barrier);
      });
    } else if (Cta::HasGuest(job)) {
      // What the guest needs, in A's place.
      const auto [guest_row, guest_col] = Cta::GuestAt(job);
      const int boxes = guest_row == guest_col ? 1 : 2;
      LoadStages(job, at, 1, bytes_b + boxes * kBoxBytes,
                 [&, guest = guest_row, other = guest_col](int k, uint32_t to, uint32_t barrier) {
                   load_b(k, to + kTileABytes, barrier);
                   ptx::TensorLoad(to, &problem.b, barrier, kBIsNMajor ? guest : k,
                                   kBIsNMajor ? k : guest, batch);
                   if (boxes > 1) {
                     ptx::TensorLoad(to + kBoxBytes, &problem.b, barrier, kBIsNMajor ? other : k,
                                     kBIsNMajor ? k : other, batch);
                   }
                 });
    } else if (job.a_in_b) {
      LoadStages(job, at, 1, bytes_b, [&](int k, uint32_t to, uint32_t barrier) {
        load_b(k, to + kTileABytes, barrier);
      });
    } else if (!job.paired) {
      LoadStages(job, at, 1, bytes, [&](int k, uint32_t to, uint32_t barrier) {
        LoadA(problem, to, barrier, k, row, batch);
        load_b(k, to + kTileABytes, barrier);
      });
    } else if (Traits::kSharing == PairSharing::kRows) {
      // Half of A each, for both.
      const int first = half * kBoxA;
      LoadStages(job, at, 1, bytes, [&](int k, uint32_t to, uint32_t barrier) {
        ptx::TensorLoadMulticast(to + first * kTileK * 2, &problem.a, barrier, 3,
                                 kAIsMMajor ? row + first : k, kAIsMMajor ? k : row + first, batch);
        load_b(k, to + kTileABytes, barrier);
      });
    } else {
      // Half of B each, for both, or every other unit.
      const int first = half * box_b;
      LoadStages(job, at, 1, bytes, [&](int k, uint32_t to, uint32_t barrier) {
        LoadA(problem, to, barrier, k, row, batch);
        for (int i = first; i < columns; i += 2 * box_b) {
          ptx::TensorLoadMulticast(to + kTileABytes + i * kTileK * 2, &map_b, barrier, 3,
                                   kBIsNMajor ? col + i : k, kBIsNMajor ? k : col + i, batch);
        }
      });
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
    for (int i = 0; i < chunks * 2; ++i) {
      const auto [row, col] = Cta::ChunkAt(job, i % 2, first_chunk + i / 2);
      ptx::TensorLoad(to + i * kBoxBytes, &map, barrier, col, row, job.batch);
    }
  }

  __device__ __forceinline__ void Produce() const {
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
    for (int turn = 1; job.width != 0; ++turn) {
      const DeviceProblem& problem = Problem(job.problem);
      if constexpr (kReadsLower) {
        LoadLower(problem, job, at);
      } else {
        LoadOperands(problem, job, at);
      }
      // Not before: it would be waited for (registers are few here) before the first loads.
      const GemmJob next = Job(turn);
      for (int chunk = 0; chunk < job.width; chunk += 2) {
        if (job.has_c2) LoadAddend(problem.c2, true, job, chunk, NextStage(at));
        LoadAddend(problem.c, job.has_c, job, chunk, NextStage(at));
      }
      job = next;
    }
    // Not before: where two branches of a graph share the chip, CTAs of the next product would take
    // multiprocessors from the other branch to wait for this one's end.
    ptx::LaunchDependents();
    // The pair's last arrivals at this CTA's barriers must find it: no CTA ends before them.
    for (int i = 0; i < Traits::kStages; ++i) NextStage(at);
  }
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_GEMM_PRODUCER_CUH_
