// The pipeline of every product: one producer warp feeds a ring of stages in shared memory through
// the copy engine, two consumer warpgroups multiply (64 rows each) and put the tile back into the
// ring, two sender warps store it from there. CTAs run in pairs; a pair on the same columns shares
// the loads of B by multicast. See docs/kernels.md.
#ifndef DMUOND_KERNELS_CUDA_GEMM_KERNEL_CUH_
#define DMUOND_KERNELS_CUDA_GEMM_KERNEL_CUH_

#include "kernels/cuda/gemm.h"
#include "kernels/cuda/gemm_schedule.h"
#include "kernels/cuda/gemm_update.cuh"
#include "kernels/cuda/ptx.cuh"

namespace dmuond::kernels::cuda {

// What the device needs to know of a problem. Tensor maps have the 128-byte swizzle and boxes of
// 64 columns; c, c2 and d of 64 rows, a and b of GemmTraits' BoxA and BoxB.
struct DeviceProblem {
  CUtensorMap a;
  CUtensorMap b;
  CUtensorMap b_wide;  // boxes of WideBoxB
  CUtensorMap c;
  CUtensorMap c2;
  CUtensorMap d;
  DeviceScalar alpha;
  DeviceScalar beta;
  DeviceScalar beta2;
  float diagonal;
};

struct GemmParams {
  DeviceProblem inline_problem;   // the one problem, where there is only one
  const DeviceProblem* problems;  // several: in device memory
  const GemmJob* jobs;
  GemmUpdateParams update;  // of kernels that update
};

constexpr int kBoxBytes = 64 * 64 * 2;
constexpr int kTileABytes = kTileM * kTileK * 2;
constexpr int kConsumers = 2;
constexpr int kThreads = 128 * (kConsumers + 1);

// Rows of a load's box of A; what lies M-major comes 64 wide, the width of the swizzle. Boxes of B
// are a unit wide, or two where the layout and the tile allow it.
constexpr int BoxA(GemmLayout layout) { return layout == GemmLayout::kTN ? 64 : kTileM; }
constexpr int WideBoxB(GemmLayout layout) {
  return layout == GemmLayout::kNT ? 2 * kTileUnit : kTileUnit;
}

// kTileN: the widest tile, 256 or 128 columns.
template <int kTileN>
struct GemmTraits {
  static constexpr int kStageBytes = kTileABytes + kTileN * kTileK * 2;
  static constexpr int kStages = kTileN == 256 ? 4 : 6;
  // Per consumer two boxes of the mirror image.
  static constexpr int kStagingBytes = kConsumers * 2 * kBoxBytes;
  static constexpr int kBarrierBytes = kStages * 2 * 8;
  // Per consumer a tile's scalars, and what an update needs of a matrix.
  static constexpr int kScalarBytes = sizeof(float4) + sizeof(MatrixUpdate);
  static constexpr int kSharedBytes =
      kStages * kStageBytes + kStagingBytes + kBarrierBytes + kConsumers * kScalarBytes;
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

// kUpdate: D is not stored but applied to masters and weights (gemm_update.cuh).
template <typename T, int kTileN, GemmLayout kLayout, bool kUpdate>
struct GemmKernel {
  using Traits = GemmTraits<kTileN>;
  using Position = RingPosition<Traits::kStages>;
  static constexpr bool kAIsMMajor = kLayout == GemmLayout::kTN;
  static constexpr bool kBIsNMajor = kLayout != GemmLayout::kNT;
  static constexpr int kBoxA = BoxA(kLayout);
  static constexpr int kUnit = kTileUnit;
  static constexpr int kWide = WideBoxB(kLayout);
  static constexpr int kAccumulators = kTileN / 2;  // per thread: 64 x kTileN over 128 threads

  const GemmParams& params;
  uint32_t stages;  // shared memory addresses
  uint32_t staging;
  uint32_t full;
  uint32_t empty;
  uint32_t scalars;
  uint32_t rank;

  __device__ GemmKernel(const GemmParams& kernel_params, uint32_t shared) : params(kernel_params) {
    if (shared % 1024 != 0) __trap();  // what the swizzle asks for
    stages = shared;
    staging = stages + Traits::kStages * Traits::kStageBytes;
    full = staging + Traits::kStagingBytes;
    empty = full + Traits::kStages * 8;
    scalars = empty + Traits::kStages * 8;
    rank = ptx::ClusterRank();
  }

  __device__ __forceinline__ uint32_t UpdateAt(int consumer) const {
    return scalars + kConsumers * sizeof(float4) + consumer * sizeof(MatrixUpdate);
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
    if (load_a) {
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
    } else if (job.paired) {
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

  // `second`: how far behind a stage's first step along k the second lies, where there are two.
  template <int kN, int kSteps>
  __device__ __forceinline__ void MultiplyStage(float (&acc)[kAccumulators], uint32_t a_offset,
                                                uint32_t second, uint32_t stage,
                                                int accumulate) const {
    const uint32_t at = stages + stage * Traits::kStageBytes;
    const uint64_t desc_a = ptx::MatrixDescriptor(at + a_offset, kBoxBytes);
    const uint64_t desc_b = ptx::MatrixDescriptor(at + kTileABytes, kBoxBytes);
    ptx::WgmmaFence();
    MultiplyStep<kN>(acc, desc_a, desc_b, accumulate);
    if constexpr (kSteps == 2) {
      MultiplyStep<kN>(acc, desc_a + (second >> 4), desc_b + (second >> 4), 1);
    }
    ptx::WgmmaCommit();
  }

  template <int kN>
  __device__ __forceinline__ static void MultiplyStep(float (&acc)[kAccumulators], uint64_t desc_a,
                                                      uint64_t desc_b, int accumulate) {
    // 16 along k: 32 bytes within a row of 128, or 16 rows of 128 bytes.
    constexpr uint64_t kAdvanceA = (kAIsMMajor ? 2048 : 32) >> 4;
    constexpr uint64_t kAdvanceB = (kBIsNMajor ? 2048 : 32) >> 4;
#pragma unroll
    for (int i = 0; i < kTileK / 16; ++i) {
      ptx::Wgmma<T, kN, kAIsMMajor ? 1 : 0, kBIsNMajor ? 1 : 0>(
          acc, desc_a + i * kAdvanceA, desc_b + i * kAdvanceB, i > 0 ? 1 : accumulate);
    }
  }

  // Where this consumer's 64 rows of A lie in a stage.
  __device__ __forceinline__ static uint32_t OffsetOfA(const GemmJob& job, const Place& place) {
    const int first = job.a_in_b ? job.row * (kTileM / kUnit) - job.col : 0;
    return (job.a_in_b ? kTileABytes : 0) + (first + place.consumer) * kBoxBytes;
  }

  // What the epilogue needs of a problem and a job, in registers.
  struct Tile {
    float alpha;
    float beta;
    float beta2;
    float diagonal;
    int row;  // of the consumer's 64 rows
    int col;
    bool symmetric;
    bool has_c;
    bool has_c2;
    bool store;
    int width;  // of the job, in chunks: this consumer may need fewer
  };

  // The scalars come from the sender: their way from device memory is long.
  __device__ __forceinline__ Tile MakeTile(const GemmJob& job, const Place& place) const {
    Tile tile;
    tile.row = job.row * kTileM + place.consumer * 64;
    tile.col = job.col * kUnit;
    tile.symmetric = job.symmetric;
    tile.has_c = job.has_c;
    tile.has_c2 = job.has_c2;
    tile.store = job.store;
    tile.width = job.width;
    const float4 values = ptx::LoadShared4(scalars + place.consumer * sizeof(float4));
    tile.alpha = values.x;
    tile.beta = values.y;
    tile.beta2 = values.z;
    tile.diagonal = values.w;
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

  // A box on the diagonal: what lies on and below it, and its mirror image above.
  __device__ __forceinline__ static void StageDiagonal(const uint32_t (&packed)[16],
                                                       const Place& place, uint32_t box) {
    const int row = place.lane / 4;
    const int col = place.lane % 4 * 2;
    const uint32_t below = (row >= col ? 0xFFFF : 0) | (row >= col + 1 ? 0xFFFF0000 : 0);
    const auto mirrored = [&](uint32_t value) {
      return (value & below) | (ptx::TransposeMatrix(value) & ~below);
    };
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // 16 columns at a time
      if (j > place.warp) break;
      // 8 x 8 blocks (0, 0), (1, 0), (0, 1), (1, 1) of the warp's rows in these columns.
      uint32_t v[4] = {packed[j * 4], packed[j * 4 + 1], packed[j * 4 + 2], packed[j * 4 + 3]};
      if (j == place.warp) {
        v[0] = mirrored(v[0]);
        v[2] = ptx::TransposeMatrix(v[1]);
        v[3] = mirrored(v[3]);
      } else {
        const int r = place.lane % 8;
        const int m = place.lane / 8;
        const int mirror_row = (j * 2 + (m >> 1)) * 8 + r;
        const int mirror_col = place.warp * 2 + (m & 1);
        ptx::StoreMatrix4Transposed(box + mirror_row * 128 + ((mirror_col ^ r) * 16), v[0], v[1],
                                    v[2], v[3]);
      }
      ptx::StoreMatrix4(FragmentRow(place, box, j * 2), v[0], v[1], v[2], v[3]);
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

  // One chunk of 64 columns of alpha * A * B + …: the diagonal, and rounding.
  __device__ __forceinline__ static void Round(float* x, const Tile& tile, const Place& place,
                                               bool on_diagonal, uint32_t (&packed)[16]) {
    if (on_diagonal && tile.diagonal != 0) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int r = place.warp * 16 + place.lane / 4 + i % 2 * 8;
        const int c = place.lane % 4 * 2 + i / 2 * 8;
        x[i * 2] += r == c ? tile.diagonal : 0.0F;
        x[i * 2 + 1] += r == c + 1 ? tile.diagonal : 0.0F;
      }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) packed[i] = Pack<T>(x[i * 2], x[i * 2 + 1]);
  }

  // Two chunks of 64 columns, or one: adds C from its boxes in the ring, puts D in their place and
  // the mirror images into boxes of their own.
  template <int kCount, bool kLast>
  __device__ __forceinline__ void StageChunks(float* x, float scale, const Tile& tile,
                                              const Place& place, int first, uint32_t stage) const {
    if (tile.has_c) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        AddBox(x + i * 32, scale, tile.beta, ChunkBox(stage, place.consumer, first + i), place);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount * 32; ++i) x[i] *= scale;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int chunk = first + i;
      const uint32_t mirror = MirrorBox(stage, place.consumer, chunk);
      // Nothing lies right of the diagonal: only the last chunk can be on it.
      const bool on_diagonal =
          kLast && i + 1 == kCount && tile.symmetric && tile.col + chunk * 64 == tile.row;
      uint32_t packed[16];
      Round(x + i * 32, tile, place, on_diagonal, packed);
      if (on_diagonal) {
        StageDiagonal(packed, place, mirror);
      } else {
        StageBox(packed, place, ChunkBox(stage, place.consumer, chunk));
        if (tile.symmetric) StageMirror(packed, place, mirror);
      }
      ptx::FenceProxyAsync();
      ptx::NamedBarrierArrive(ReadyBarrier(place.consumer, chunk), kBarrierThreads);
    }
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
  __device__ __forceinline__ void StageTile(float (&acc)[kAccumulators], const GemmJob& job,
                                            const Place& place, Position& at) const {
    constexpr int kChunks = kN / 64;
    // The last tile's mirror images have been sent, this one's scalars are there.
    ptx::NamedBarrierSync(kBarrierFree + place.consumer, kBarrierThreads);
    const Tile tile = MakeTile(job, place);
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
      float* const x = acc + first * 32;
      if (!tile.store) {
        ptx::NamedBarrierArrive(ReadyBarrier(place.consumer, first), kBarrierThreads);
      } else if (first + 2 < kChunks) {
        StageChunks<2, false>(x, scale, tile, place, first, at.stage);
      } else if (both) {
        StageChunks<2, true>(x, scale, tile, place, first, at.stage);
      } else {
        StageChunks<1, true>(x, scale, tile, place, first, at.stage);
      }
      at.Advance();
    }
    if ((kChunks + 1) / 2 < (tile.width + 1) / 2)
      SkipChunks(tile, place, at, (kChunks + 1) / 2 * 2);
  }

  // As StageTile(), of a product that updates. A stage of the ring is given back as soon as C has
  // been read from it; a chunk's masters are asked for while the one before it is worked on.
  template <int kN>
  __device__ __forceinline__ void UpdateTile(float (&acc)[kAccumulators], const GemmJob& job,
                                             const Place& place, Position& at) const {
    constexpr int kChunks = kN / 64;
    ptx::NamedBarrierSync(kBarrierFree + place.consumer, kBarrierThreads);
    const Tile tile = MakeTile(job, place);
    const UpdateEpilogue<T> epilogue(params.update, LoadMatrixUpdate(UpdateAt(place.consumer)),
                                     tile.row, tile.col, place.warp, place.lane);
    // Of three halves of chunks: two are on their way while one is worked on.
    typename UpdateEpilogue<T>::Masters masters[3];
    const auto load = [&](int half) {
      if (half < 2 * kChunks) epilogue.LoadMasters(half / 2, half % 2, masters[half % 3]);
    };
    if (tile.store) {
      load(0);
      load(1);
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      float* const x = acc + chunk * 32;
      if (chunk % 2 == 0) ptx::BarrierWait(full + at.stage * 8, at.parity);
      if (tile.has_c) {
        AddBox(x, tile.alpha, tile.beta, ChunkBox(at.stage, place.consumer, chunk), place);
      } else {
#pragma unroll
        for (int i = 0; i < 32; ++i) x[i] *= tile.alpha;
      }
      uint32_t packed[16];
      Round(x, tile, place, /*on_diagonal=*/false, packed);
      if (tile.store || chunk % 2 == 0) {
        ptx::NamedBarrierArrive(ReadyBarrier(place.consumer, chunk), kBarrierThreads);
      }
      if (chunk % 2 == 1 || chunk + 1 == kChunks) at.Advance();
      if (!tile.store) continue;
#pragma unroll
      for (int half = 2 * chunk; half < 2 * chunk + 2; ++half) {
        load(half + 2);
        epilogue.Apply(chunk, half % 2, packed, masters[half % 3]);
      }
    }
  }

  template <int kN, int kSteps>
  __device__ __forceinline__ void MultiplyTile(float (&acc)[kAccumulators], const GemmJob& job,
                                               const Place& place, Position& at) const {
    const uint32_t a_offset = OffsetOfA(job, place);
    const uint32_t second = job.width * kBoxBytes;
    uint32_t last_stage = 0;
    for (int i = 0; i < job.stages; ++i) {
      ptx::BarrierWait(full + at.stage * 8, at.parity);
      if constexpr (kN > 0) {
        MultiplyStage<kN, kSteps>(acc, a_offset, second, at.stage, i > 0 ? 1 : 0);
      }
      if (i > 0) {
        if constexpr (kN > 0) ptx::WgmmaWait<1>();
        Release(place, last_stage);
      }
      last_stage = at.stage;
      at.Advance();
    }
    if constexpr (kN > 0) ptx::WgmmaWait<0>();
    Release(place, last_stage);
  }

  // kSteps: along k, in each stage.
  template <int kN, int kSteps = 1>
  __device__ __forceinline__ void ConsumeTile(const GemmJob& job, const Place& place,
                                              Position& at) const {
    float acc[kAccumulators];
    MultiplyTile<kN, kSteps>(acc, job, place, at);
    if constexpr (kUpdate) {
      UpdateTile<kN>(acc, job, place, at);
    } else {
      StageTile<kN>(acc, job, place, at);
    }
  }

  // ---- Senders: a warp for each consumer, so that consumers wait for no store ----

  __device__ void Send(int consumer) const {
    const bool elected = threadIdx.x % 32 == 0;
    Position at;
    GemmJob job = Job(0);
    ptx::WaitForPrevious();
    for (int turn = 1; job.width != 0; ++turn) {
      SendScalars(job, consumer);
      if constexpr (kUpdate) SendUpdate(job, consumer);
      ptx::NamedBarrierArrive(kBarrierFree + consumer, kBarrierThreads);
      const GemmJob next = Job(turn);
      const int chunks = job.store ? Columns(job, consumer) / 64 : 0;
      at.Skip(job.stages);
      for (int first = 0; first < job.width; first += 2) {
        if (job.has_c2) at.Skip(1);
        // Of a stage of which the consumer needs nothing it reports one chunk.
        for (int chunk = first; chunk < max(first + 1, min(first + 2, chunks)); ++chunk) {
          ptx::NamedBarrierSync(ReadyBarrier(consumer, chunk), kBarrierThreads);
          if (!kUpdate && elected && chunk < chunks) SendChunk(job, consumer, chunk, at.stage);
        }
        if (elected) {
          // The stage is the producers' again once the copy engine has read D from it. What does
          // not hold up a stage comes last.
          if (kUpdate || first + 2 < job.width) {
            ptx::BulkWaitRead<0>();
          } else {
            SendStaged(job, consumer, chunks);
            ptx::BulkWaitRead<1>();
          }
          ptx::BarrierArriveRemote(empty + at.stage * 8, 0);
          ptx::BarrierArriveRemote(empty + at.stage * 8, 1);
        }
        at.Skip(1);
      }
      if (elected) ptx::BulkWaitRead<0>();
      __syncwarp();
      job = next;
    }
  }

  // Of a tile, to its consumer.
  __device__ __forceinline__ void SendScalars(const GemmJob& job, int consumer) const {
    const DeviceProblem& problem = Problem(job.problem);
    const float4 values = make_float4(Load(problem.alpha, job.batch), Load(problem.beta, job.batch),
                                      Load(problem.beta2, job.batch), problem.diagonal);
    if (threadIdx.x % 32 == 0) {
      ptx::StoreShared4(scalars + consumer * sizeof(float4), values);
    }
    __syncwarp();
  }

  // Of a tile's matrix, to its consumer.
  __device__ __forceinline__ void SendUpdate(const GemmJob& job, int consumer) const {
    const MatrixUpdate values = ReadMatrixUpdate(params.update, job.batch);
    if (threadIdx.x % 32 == 0) StoreMatrixUpdate(UpdateAt(consumer), values);
    __syncwarp();
  }

  // Whether a chunk's mirror image lies in the ring, beside D; the others do not hold up a stage.
  __device__ __forceinline__ static constexpr bool MirrorInRing(int chunk) {
    return kTileN == 256 && chunk % 2 == 0;
  }

  // A chunk from a stage of the ring, and its mirror image if that lies there too.
  __device__ __forceinline__ void SendChunk(const GemmJob& job, int consumer, int chunk,
                                            uint32_t stage) const {
    const DeviceProblem& problem = Problem(job.problem);
    const int row = job.row * kTileM + consumer * 64;
    const int col = job.col * kUnit + chunk * 64;
    if (!job.symmetric || col != row) {
      ptx::TensorStore(&problem.d, ChunkBox(stage, consumer, chunk), col, row, job.batch);
    }
    if (job.symmetric && MirrorInRing(chunk)) {
      ptx::TensorStore(&problem.d, MirrorBox(stage, consumer, chunk), row, col, job.batch);
    }
    ptx::BulkCommit();
  }

  // A tile's mirror images that lie in boxes of their own.
  __device__ __forceinline__ void SendStaged(const GemmJob& job, int consumer, int chunks) const {
    const DeviceProblem& problem = Problem(job.problem);
    const int row = job.row * kTileM + consumer * 64;
    for (int chunk = 0; job.symmetric && chunk < chunks; ++chunk) {
      if (MirrorInRing(chunk)) continue;
      const int col = job.col * kUnit + chunk * 64;
      ptx::TensorStore(&problem.d, MirrorBox(0, consumer, chunk), row, col, job.batch);
    }
    ptx::BulkCommit();
  }

  // Columns that a consumer's 64 rows need: none right of the diagonal.
  __device__ __forceinline__ static int Columns(const GemmJob& job, int consumer) {
    const int columns = job.width * kUnit;
    if (!job.symmetric) return columns;
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
      const int columns = Columns(job, place.consumer);
      if (columns == kTileN) {
        ConsumeTile<kTileN>(job, place, at);
      } else if (columns == 64) {
        if (!kUpdate && kTileN == 256 && job.doubled) {
          ConsumeTile<64, 2>(job, place, at);
        } else {
          ConsumeTile<64>(job, place, at);
        }
      } else if (!kUpdate && columns == 0) {
        ConsumeTile<0>(job, place, at);
      } else if constexpr (kTileN == 256) {
        if (columns == 192) {
          ConsumeTile<192>(job, place, at);
        } else if (!kUpdate && job.doubled) {
          ConsumeTile<128, 2>(job, place, at);
        } else {
          ConsumeTile<128>(job, place, at);
        }
      }
      job = next;
    }
  }
};

template <typename T, int kTileN, GemmLayout kLayout, bool kUpdate>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    GemmEntry(const __grid_constant__ GemmParams params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  GemmKernel<T, kTileN, kLayout, kUpdate> kernel(params, ptx::SharedAddress(shared));
  if (threadIdx.x == 0) kernel.InitBarriers();
  ptx::ClusterSync();
  if (threadIdx.x < 128) {
    ptx::RegistersDecrease<56>();
    if (threadIdx.x == 0) kernel.Produce();
    if (threadIdx.x >= 32 && threadIdx.x < 96) kernel.Send(threadIdx.x / 32 - 1);
  } else {
    ptx::RegistersIncrease<224>();
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
template <typename T>
GemmVariant FindUpdateGemm(GemmTile tile, GemmLayout layout);

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_GEMM_KERNEL_CUH_
