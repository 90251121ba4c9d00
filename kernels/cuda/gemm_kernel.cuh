// The pipeline of every product: one producer warp feeds a ring of stages in shared memory through
// the copy engine, two consumer warpgroups multiply (64 rows each) and put the tile back into the
// ring, two sender warps store it from there. CTAs run in pairs; a pair on the same columns shares
// the loads of B by multicast. See docs/kernels.md.
#ifndef DMUOND_KERNELS_CUDA_GEMM_KERNEL_CUH_
#define DMUOND_KERNELS_CUDA_GEMM_KERNEL_CUH_

#include "kernels/cuda/gemm.h"
#include "kernels/cuda/gemm_schedule.h"
#include "kernels/cuda/ptx.cuh"

namespace dmuond::kernels::cuda {

// What the device needs to know of a problem. Tensor maps have the 128-byte swizzle and boxes of
// 64 columns; c, c2 and d of 64 rows, a and b of GemmTraits' BoxA and BoxB.
struct DeviceProblem {
  CUtensorMap a;
  CUtensorMap b;
  CUtensorMap c;
  CUtensorMap c2;
  CUtensorMap d;
  DeviceScalar alpha;
  DeviceScalar beta;
  DeviceScalar beta2;
  float diagonal;
  int rows;
  int cols;
  int steps;  // along k, 64 at a time
  int symmetric;
  int has_c;
  int has_c2;
};

struct GemmParams {
  DeviceProblem inline_problem;   // the one problem, where there is only one
  const DeviceProblem* problems;  // several: in device memory
  const GemmJob* jobs;
};

constexpr int kTileK = 64;
constexpr int kBoxBytes = 64 * 64 * 2;
constexpr int kTileABytes = kTileM * kTileK * 2;
constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (kConsumers + 1);

// Rows of a load's box of A; what lies M-major comes 64 wide, the width of the swizzle. Boxes of B
// are a unit wide in every layout.
constexpr int BoxA(GemmLayout layout) { return layout == GemmLayout::kTN ? 64 : kTileM; }

// kTileN: the widest tile, 256 or 128 columns.
template <int kTileN>
struct GemmTraits {
  static constexpr int kStageBytes = kTileABytes + kTileN * kTileK * 2;
  static constexpr int kStages = kTileN == 256 ? 4 : 6;
  // Per consumer two boxes of the mirror image.
  static constexpr int kStagingBytes = kConsumers * 2 * kBoxBytes;
  static constexpr int kBarrierBytes = kStages * 2 * 8;
  static constexpr int kSharedBytes = kStages * kStageBytes + kStagingBytes + kBarrierBytes;
};

template <typename T>
__device__ __forceinline__ uint32_t Pack(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}
template <typename T>
__device__ __forceinline__ float2 Unpack(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
  }
}

__device__ __forceinline__ float Load(const DeviceScalar& scalar, int batch) {
  return scalar.values == nullptr ? scalar.factor : scalar.factor * __ldg(scalar.values + batch);
}

// Position in the ring of stages.
template <int kStages>
struct RingPosition {
  uint32_t stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void Skip(int stages) {
    stage = (stage + static_cast<uint32_t>(stages)) % kStages;  // the parity is not kept
  }
};

// Named barriers of a CTA: bar.sync ids. Consumers and senders meet at "free" (the boxes of mirror
// images may be written) and at "ready", one for each chunk of a tile.
constexpr uint32_t kBarrierAddend = 1;
constexpr uint32_t kBarrierFree = 3;
constexpr uint32_t kBarrierReady = 5;
constexpr uint32_t kBarrierThreads = 128 + 32;
__device__ __forceinline__ uint32_t ReadyBarrier(int consumer, int chunk) {
  return kBarrierReady + consumer * 4 + chunk;
}

template <typename T, int kTileN, GemmLayout kLayout>
struct GemmKernel {
  using Traits = GemmTraits<kTileN>;
  using Position = RingPosition<Traits::kStages>;
  static constexpr bool kAIsMMajor = kLayout == GemmLayout::kTN;
  static constexpr bool kBIsNMajor = kLayout != GemmLayout::kNT;
  static constexpr int kBoxA = BoxA(kLayout);
  static constexpr int kUnit = kTileUnit;
  static constexpr int kAccumulators = kTileN / 2;  // per thread: 64 x kTileN over 128 threads

  const GemmParams& params;
  uint32_t stages;  // shared memory addresses
  uint32_t staging;
  uint32_t full;
  uint32_t empty;
  uint32_t rank;

  __device__ GemmKernel(const GemmParams& kernel_params, uint32_t shared) : params(kernel_params) {
    if (shared % 1024 != 0) __trap();  // what the swizzle asks for
    stages = shared;
    staging = stages + Traits::kStages * Traits::kStageBytes;
    full = staging + Traits::kStagingBytes;
    empty = full + Traits::kStages * 8;
    rank = ptx::ClusterRank();
  }

  __device__ void InitBarriers() const {
    for (int s = 0; s < Traits::kStages; ++s) {
      ptx::BarrierInit(full + s * 8, 1);
      ptx::BarrierInit(empty + s * 8, kConsumers * 2);  // both CTAs' consumers
    }
    ptx::FenceBarrierInit();
  }

  __device__ const DeviceProblem& Problem(int index) const {
    return params.problems == nullptr ? params.inline_problem : params.problems[index];
  }
  __device__ GemmJob Job(int turn) const {
    const uint32_t at = (turn * ptx::ClusterCount() + ptx::ClusterId()) * 2 + rank;
    const int4 words = __ldg(reinterpret_cast<const int4*>(params.jobs + at));
    return *reinterpret_cast<const GemmJob*>(&words);
  }

  // ---- Producer: one thread ----

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

  // One stage of the ring: a step along k of both operands.
  __device__ __forceinline__ void LoadStep(const DeviceProblem& problem, const GemmJob& job, int k,
                                           uint32_t stage) const {
    const int columns = job.width * kUnit;
    const int row = job.row * kTileM;
    const int col = job.col * kUnit;
    const uint32_t barrier = full + stage * 8;
    const uint32_t to_a = stages + stage * Traits::kStageBytes;
    const uint32_t to_b = to_a + kTileABytes;
    ptx::BarrierArriveExpect(barrier, kTileABytes + columns * kTileK * 2);
    LoadOperand<kAIsMMajor, kBoxA, false>(problem.a, to_a, barrier, k, row, kTileM, job.batch);
    if (job.paired != 0) {
      // Every other unit each, for both.
      for (int offset = static_cast<int>(rank) * kUnit; offset < columns; offset += 2 * kUnit) {
        LoadOperand<kBIsNMajor, kUnit, true>(problem.b, to_b + offset * kTileK * 2, barrier, k,
                                             col + offset, kUnit, job.batch);
      }
    } else {
      LoadOperand<kBIsNMajor, kUnit, false>(problem.b, to_b, barrier, k, col, columns, job.batch);
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
      ptx::PrefetchTensorMap(&problem.d);
      if (problem.has_c != 0) ptx::PrefetchTensorMap(&problem.c);
    }
    ptx::WaitForPrevious();
    const auto next_stage = [&] {
      ptx::BarrierWait(empty + at.stage * 8, at.parity ^ 1);
      const uint32_t stage = at.stage;
      at.Advance();
      return stage;
    };
    for (int turn = 1; job.width != 0; ++turn) {
      const GemmJob next = Job(turn);
      const DeviceProblem& problem = Problem(job.problem);
      const int steps = problem.steps;
      for (int step = 0; step < steps; ++step) {
        LoadStep(problem, job, step * kTileK, next_stage());
      }
      for (int chunk = 0; chunk < job.width; chunk += 2) {
        if (problem.has_c2 != 0) LoadAddend(problem.c2, true, job, chunk, next_stage());
        LoadAddend(problem.c, problem.has_c != 0, job, chunk, next_stage());
      }
      job = next;
    }
  }

  // ---- Consumers: a warpgroup each ----

  struct Place {
    int thread;  // in the warpgroup
    int warp;    // in the warpgroup
    int lane;
    int consumer;  // 0 or 1: rows 0..63 or 64..127 of the tile
  };

  __device__ __forceinline__ void Release(const Place& place, uint32_t stage) const {
    // One thread for each CTA of the pair.
    if (place.thread == 0) ptx::BarrierArriveRemote(empty + stage * 8, 0);
    if (place.thread == 32) ptx::BarrierArriveRemote(empty + stage * 8, 1);
  }

  template <int kN>
  __device__ __forceinline__ void MultiplyStage(float (&acc)[kAccumulators], const Place& place,
                                                uint32_t stage, int accumulate) const {
    const uint32_t a = stages + stage * Traits::kStageBytes;
    const uint64_t desc_a = ptx::MatrixDescriptor(a + place.consumer * kBoxBytes, kBoxBytes);
    const uint64_t desc_b = ptx::MatrixDescriptor(a + kTileABytes, kBoxBytes);
    // 16 along k: 32 bytes within a row of 128, or 16 rows of 128 bytes.
    constexpr uint64_t kAdvanceA = (kAIsMMajor ? 2048 : 32) >> 4;
    constexpr uint64_t kAdvanceB = (kBIsNMajor ? 2048 : 32) >> 4;
    ptx::WgmmaFence();
#pragma unroll
    for (int i = 0; i < kTileK / 16; ++i) {
      ptx::Wgmma<T, kN, kAIsMMajor ? 1 : 0, kBIsNMajor ? 1 : 0>(
          acc, desc_a + i * kAdvanceA, desc_b + i * kAdvanceB, i > 0 ? 1 : accumulate);
    }
    ptx::WgmmaCommit();
  }

  // What the epilogue needs of a problem and a job, in registers: the compiler would read the
  // problem again after every barrier.
  struct Tile {
    const CUtensorMap* d;
    float alpha;
    float beta;
    float beta2;
    float diagonal;
    int row;  // of the consumer's 64 rows
    int col;
    int batch;
    bool symmetric;
    bool has_c;
    bool has_c2;
    bool store;
    int width;  // of the job, in chunks: this consumer may need fewer
  };

  __device__ __forceinline__ Tile MakeTile(const DeviceProblem& problem, const GemmJob& job,
                                           const Place& place) const {
    Tile tile;
    tile.d = &problem.d;
    tile.row = job.row * kTileM + place.consumer * 64;
    tile.col = job.col * kUnit;
    tile.batch = job.batch;
    tile.symmetric = problem.symmetric != 0;
    tile.has_c = problem.has_c != 0;
    tile.has_c2 = problem.has_c2 != 0;
    tile.store = job.store != 0;
    tile.width = job.width;
    tile.alpha = Load(problem.alpha, job.batch);
    tile.beta = Load(problem.beta, job.batch);
    tile.beta2 = Load(problem.beta2, job.batch);
    tile.diagonal = problem.diagonal;
    return tile;
  }

  // Address of the row that this lane gives to ldmatrix and stmatrix for the 8 x 8 blocks
  // (2 warp, j), (2 warp + 1, j), (2 warp, j + 1), (2 warp + 1, j + 1) of a box.
  __device__ __forceinline__ static uint32_t FragmentRow(const Place& place, uint32_t box, int j) {
    const int r = place.lane % 8;
    const int m = place.lane / 8;
    return box + (place.warp * 16 + (m & 1) * 8 + r) * 128 + (((j + (m >> 1)) ^ r) * 16);
  }

  // x = scale * x + factor * (the box's elements)
  __device__ __forceinline__ static void AddBox(float* x, float scale, float factor, uint32_t box,
                                                const Place& place) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      uint32_t v[4];
      ptx::LoadMatrix4(FragmentRow(place, box, j), v);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 c = Unpack<T>(v[i]);
        float* const to = x + (j * 2 + i) * 2;
        to[0] = scale * to[0] + factor * c.x;
        to[1] = scale * to[1] + factor * c.y;
      }
    }
  }

  // A box on the diagonal: what lies below it, and its mirror image above.
  __device__ __forceinline__ static void StageDiagonal(const uint32_t (&packed)[16],
                                                       const Place& place, uint32_t box) {
    const int r = place.lane % 8;
    const int row = place.lane / 4;
    const int col = place.lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = place.warp * 2 + h;  // 8 x 8 block (i, j)
        uint32_t value = packed[j * 2 + h];
        if (i < j) continue;
        if (i == j) {
          const uint32_t transposed = ptx::TransposeMatrix(value);
          const uint32_t low = (row >= col ? value : transposed) & 0xFFFF;
          const uint32_t high = (row >= col + 1 ? value : transposed) & 0xFFFF0000;
          value = low | high;
        }
        ptx::StoreMatrix1(box + (i * 8 + r) * 128 + ((j ^ r) * 16), value);
        if (i > j) {
          ptx::StoreMatrix1Transposed(box + (j * 8 + r) * 128 + ((i ^ r) * 16), value);
        }
      }
    }
  }

  __device__ __forceinline__ static void StageBox(const uint32_t (&packed)[16], const Place& place,
                                                  uint32_t box) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const uint32_t* v = packed + j * 2;
      ptx::StoreMatrix4(FragmentRow(place, box, j), v[0], v[1], v[2], v[3]);
    }
  }

  __device__ __forceinline__ static void StageMirror(const uint32_t (&packed)[16],
                                                     const Place& place, uint32_t box) {
    const int r = place.lane % 8;
    const int m = place.lane / 8;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const uint32_t* v = packed + j * 2;
      const int row = (j + (m >> 1)) * 8 + r;
      const int col = place.warp * 2 + (m & 1);
      ptx::StoreMatrix4Transposed(box + row * 128 + ((col ^ r) * 16), v[0], v[1], v[2], v[3]);
    }
  }

  // One chunk of 64 columns: adds C from its box in the ring, puts D in its place and its mirror
  // image into a box of its own.
  __device__ __forceinline__ void StageChunk(float* x, float scale, const Tile& tile,
                                             const Place& place, int chunk, bool last, uint32_t box,
                                             uint32_t mirror) const {
    // Nothing lies right of the diagonal: only the last chunk can be on it.
    const bool on_diagonal = last && tile.symmetric && tile.col + chunk * 64 == tile.row;
    if (tile.has_c) {
      AddBox(x, scale, tile.beta, box, place);
    } else {
#pragma unroll
      for (int i = 0; i < 32; ++i) x[i] *= scale;
    }
    if (on_diagonal) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int r = place.warp * 16 + place.lane / 4 + i % 2 * 8;
        const int c = place.lane % 4 * 2 + i / 2 * 8;
        x[i * 2] += r == c ? tile.diagonal : 0.0F;
        x[i * 2 + 1] += r == c + 1 ? tile.diagonal : 0.0F;
      }
    }
    uint32_t packed[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) packed[i] = Pack<T>(x[i * 2], x[i * 2 + 1]);

    if (on_diagonal) {
      StageDiagonal(packed, place, mirror);
    } else {
      StageBox(packed, place, box);
      if (tile.symmetric) StageMirror(packed, place, mirror);
    }
    ptx::FenceProxyAsync();
  }

  // Where chunk `chunk` of a consumer's rows lies in a stage of the ring, and its mirror image. A
  // stage of 48 KB has room for one mirror image a consumer behind the four boxes of D.
  __device__ __forceinline__ uint32_t ChunkBox(uint32_t stage, int consumer, int chunk) const {
    return stages + stage * Traits::kStageBytes + (chunk % 2 * 2 + consumer) * kBoxBytes;
  }
  __device__ __forceinline__ uint32_t MirrorBox(uint32_t stage, int consumer, int chunk) const {
    const uint32_t own = staging + consumer * 2 * kBoxBytes;
    if (kTileN == 128) return own + chunk * kBoxBytes;
    if (chunk % 2 == 1) return own + chunk / 2 * kBoxBytes;
    return stages + stage * Traits::kStageBytes + (4 + consumer) * kBoxBytes;
  }

  // A stage of the ring with addends of columns that this consumer does not need.
  __device__ __forceinline__ void SkipChunks(const Tile& tile, const Place& place, Position& at,
                                             int first) const {
    if (tile.has_c2) {
      ptx::BarrierWait(full + at.stage * 8, at.parity);
      Release(place, at.stage);
      at.Advance();
    }
    ptx::BarrierWait(full + at.stage * 8, at.parity);
    ptx::NamedBarrierArrive(ReadyBarrier(place.consumer, first), kBarrierThreads);
    at.Advance();
  }

  template <int kN>
  __device__ __forceinline__ void StageTile(float (&acc)[kAccumulators], const Tile& tile,
                                            const Place& place, Position& at) const {
    constexpr int kChunks = kN / 64;
    // The last tile's mirror images have been sent.
    ptx::NamedBarrierSync(kBarrierFree + place.consumer, kBarrierThreads);
#pragma unroll
    for (int first = 0; first < kChunks; first += 2) {
      constexpr bool kBoth = kChunks > 1;
      const bool both = first + 1 < kChunks;
      float scale = tile.alpha;
      if (tile.has_c2) {
        const uint32_t from = stages + at.stage * Traits::kStageBytes + place.consumer * kBoxBytes;
        ptx::BarrierWait(full + at.stage * 8, at.parity);
        AddBox(acc + first * 32, scale, tile.beta2, from, place);
        if constexpr (kBoth) {
          if (both) AddBox(acc + first * 32 + 32, scale, tile.beta2, from + 2 * kBoxBytes, place);
        }
        scale = 1;
        ptx::NamedBarrierSync(kBarrierAddend + place.consumer, 128);
        Release(place, at.stage);
        at.Advance();
      }
      ptx::BarrierWait(full + at.stage * 8, at.parity);
#pragma unroll
      for (int chunk = first; chunk < first + 2 && chunk < kChunks; ++chunk) {
        if (tile.store) {
          StageChunk(acc + chunk * 32, scale, tile, place, chunk, chunk + 1 == kChunks,
                     ChunkBox(at.stage, place.consumer, chunk),
                     MirrorBox(at.stage, place.consumer, chunk));
        }
        ptx::NamedBarrierArrive(ReadyBarrier(place.consumer, chunk), kBarrierThreads);
      }
      at.Advance();
    }
    if ((kChunks + 1) / 2 < (tile.width + 1) / 2)
      SkipChunks(tile, place, at, (kChunks + 1) / 2 * 2);
  }

  template <int kN>
  __device__ __forceinline__ void ConsumeTile(const DeviceProblem& problem, const GemmJob& job,
                                              const Place& place, Position& at) const {
    float acc[kAccumulators];
    uint32_t last_stage = 0;
    const int steps = problem.steps;
    const Tile tile = MakeTile(problem, job, place);
    for (int step = 0; step < steps; ++step) {
      ptx::BarrierWait(full + at.stage * 8, at.parity);
      if constexpr (kN > 0) MultiplyStage<kN>(acc, place, at.stage, step > 0 ? 1 : 0);
      if (step > 0) {
        if constexpr (kN > 0) ptx::WgmmaWait<1>();
        Release(place, last_stage);
      }
      last_stage = at.stage;
      at.Advance();
    }
    if constexpr (kN > 0) ptx::WgmmaWait<0>();
    Release(place, last_stage);
    StageTile<kN>(acc, tile, place, at);
  }

  // ---- Senders: a warp for each consumer, so that consumers wait for no store ----

  __device__ void Send(int consumer) const {
    const bool elected = threadIdx.x % 32 == 0;
    Position at;
    GemmJob job = Job(0);
    ptx::WaitForPrevious();
    ptx::NamedBarrierArrive(kBarrierFree + consumer, kBarrierThreads);
    for (int turn = 1; job.width != 0; ++turn) {
      const GemmJob next = Job(turn);
      const DeviceProblem& problem = Problem(job.problem);
      const int row = job.row * kTileM + consumer * 64;
      const int chunks = Columns(problem, job, consumer) / 64;
      at.Skip(problem.steps);
      for (int first = 0; first < job.width; first += 2) {
        if (problem.has_c2 != 0) at.Skip(1);
        for (int chunk = first; chunk < Reported(first, chunks); ++chunk) {
          ptx::NamedBarrierSync(ReadyBarrier(consumer, chunk), kBarrierThreads);
          if (elected && job.store != 0 && chunk < chunks) {
            SendChunk(problem, job, row, chunk, ChunkBox(at.stage, consumer, chunk),
                      MirrorBox(at.stage, consumer, chunk));
          }
        }
        if (elected) {
          // The stage is the producers' again once the copy engine has read D from it.
          ptx::BulkWaitRead<0>();
          ptx::BarrierArriveRemote(empty + at.stage * 8, 0);
          ptx::BarrierArriveRemote(empty + at.stage * 8, 1);
        }
        at.Skip(1);
      }
      __syncwarp();
      if (next.width != 0) ptx::NamedBarrierArrive(kBarrierFree + consumer, kBarrierThreads);
      job = next;
    }
    // The end of the kernel waits for the writes themselves.
    if (elected) ptx::BulkWaitRead<0>();
  }

  // One past the last chunk that a consumer with so many reports ready of the stage that begins
  // with chunk `first`: a stage of which it needs nothing is reported all the same.
  __device__ __forceinline__ static int Reported(int first, int chunks) {
    return max(first + 1, min(first + 2, chunks));
  }

  __device__ __forceinline__ static void SendChunk(const DeviceProblem& problem, const GemmJob& job,
                                                   int row, int chunk, uint32_t box,
                                                   uint32_t mirror) {
    const int col = job.col * kUnit + chunk * 64;
    if (problem.symmetric == 0) {
      ptx::TensorStore(&problem.d, box, col, row, job.batch);
    } else if (col == row) {
      ptx::TensorStore(&problem.d, mirror, col, row, job.batch);
    } else {
      ptx::TensorStore(&problem.d, box, col, row, job.batch);
      ptx::TensorStore(&problem.d, mirror, row, col, job.batch);
    }
    ptx::BulkCommit();
  }

  // Columns that a consumer's 64 rows need: none right of the diagonal.
  __device__ __forceinline__ static int Columns(const DeviceProblem& problem, const GemmJob& job,
                                                int consumer) {
    const int columns = job.width * kUnit;
    if (problem.symmetric == 0) return columns;
    return min(columns, job.row * kTileM + consumer * 64 + 64 - job.col * kUnit);
  }

  __device__ void Consume() const {
    Place place;
    place.thread = threadIdx.x % 128;
    place.warp = place.thread / 32;
    place.lane = threadIdx.x % 32;
    place.consumer = threadIdx.x / 128 - 1;
    Position at;
    GemmJob job = Job(0);
    ptx::WaitForPrevious();
    for (int turn = 1; job.width != 0; ++turn) {
      const GemmJob next = Job(turn);
      const DeviceProblem& problem = Problem(job.problem);
      const int columns = Columns(problem, job, place.consumer);
      if (columns == kTileN) {
        ConsumeTile<kTileN>(problem, job, place, at);
      } else if (columns == 64) {
        ConsumeTile<64>(problem, job, place, at);
      } else if (columns == 0) {
        ConsumeTile<0>(problem, job, place, at);
      } else if constexpr (kTileN == 256) {
        if (columns == 192) {
          ConsumeTile<192>(problem, job, place, at);
        } else {
          ConsumeTile<128>(problem, job, place, at);
        }
      }
      job = next;
    }
  }
};

template <typename T, int kTileN, GemmLayout kLayout>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    GemmEntry(const __grid_constant__ GemmParams params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  GemmKernel<T, kTileN, kLayout> kernel(params, ptx::SharedAddress(shared));
  if (threadIdx.x == 0) kernel.InitBarriers();
  ptx::LaunchDependents();
  ptx::ClusterSync();
  if (threadIdx.x < 128) {
    ptx::RegistersDecrease<40>();
    if (threadIdx.x == 0) kernel.Produce();
    if (threadIdx.x >= 32 && threadIdx.x < 96) kernel.Send(threadIdx.x / 32 - 1);
  } else {
    ptx::RegistersIncrease<232>();
    kernel.Consume();
  }
  ptx::ClusterSync();  // a CTA's shared memory is its partner's to write until both are done
}

// One file of instantiations per element type (nvcc's time).
using GemmFunction = void (*)(GemmParams);
struct GemmVariant {
  GemmFunction function;
  int shared_bytes;
};
template <typename T>
GemmVariant FindGemm(GemmTile tile, GemmLayout layout);

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_GEMM_KERNEL_CUH_
