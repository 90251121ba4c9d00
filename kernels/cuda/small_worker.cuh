// The products of a small round: the Gram matrix, from slices of X, and the symmetric ones after
// it, of matrices in shared memory.
#ifndef DMUOND_KERNELS_CUDA_SMALL_WORKER_CUH_
#define DMUOND_KERNELS_CUDA_SMALL_WORKER_CUH_

#include "kernels/cuda/small_cta.cuh"

namespace dmuond::kernels::cuda {

// A warpgroup of one CTA, and its box.
template <typename T, int kStrips, bool kTall, int kRank, int kGroup>
struct SmallWorker : SmallCta<kStrips, kTall> {
  using Cta = SmallCta<kStrips, kTall>;
  using Cta::boxes;
  using Cta::empty;
  using Cta::exchanged;
  using Cta::full;
  using Cta::matrix;
  using Cta::moved;
  using Cta::params;

  static constexpr int kCtas = Cta::kCtas;
  static constexpr SmallBox kBox = SmallBoxOf(kStrips, kRank, kGroup);
  static constexpr bool kDiagonal = kBox.row == kBox.col;
  static constexpr int kPeer = kCtas == 2 ? 1 - kRank : 0;
  // Boxes that the partner computes.
  static constexpr int kReceived = Cta::kGroups;
  static constexpr int kReceivedPartial = 2;

  __device__ __forceinline__ static bool Partial(int place) {
    return kStrips == 4 && place == kPartialPlace;
  }
  __device__ __forceinline__ static constexpr uint32_t PlaceOffset(int place) {
    return static_cast<uint32_t>(place) * kPlaceBoxes * kBoxBytes;
  }
  // Of the box (row, col), row >= col, as CTA `of` lays it out.
  __device__ __forceinline__ static constexpr uint32_t BoxOffset(int of, int row, int col) {
    return static_cast<uint32_t>(SmallBoxIndex(kStrips, of, row, col)) * kBoxBytes;
  }
  __device__ __forceinline__ uint32_t Own(int place) const {
    return boxes + PlaceOffset(place) + BoxOffset(kRank, kBox.row, kBox.col);
  }

  // ---- The Gram matrix ----

  __device__ __forceinline__ void Release(int thread, int stage) const {
    if (thread == 0) ptx::BarrierArriveRemote(empty + stage * 8, 0);
    if (kCtas == 2 && thread == 32) ptx::BarrierArriveRemote(empty + stage * 8, 1);
  }

  __device__ __forceinline__ void MultiplyGram(float (&acc)[32], int thread) const {
    constexpr int kMajor = kTall ? 1 : 0;
    constexpr uint64_t kAdvance = (kTall ? 2048 : 32) >> 4;
    constexpr uint64_t kLeft = (kBox.row * kBoxBytes) >> 4;
    constexpr uint64_t kRight = (kBox.col * kBoxBytes) >> 4;
    int stage = 0;
    uint32_t parity = 0;
    int last = 0;
    for (int i = 0; i < params.steps; ++i) {
      ptx::BarrierWait(full + stage * 8, parity);
      const uint64_t slice = ptx::MatrixDescriptor(boxes + stage * kSmallStageBytes, kBoxBytes);
      ptx::WgmmaFence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        ptx::Wgmma<T, 64, kMajor, kMajor>(acc, slice + kLeft + k * kAdvance,
                                          slice + kRight + k * kAdvance, k > 0 || i > 0 ? 1 : 0);
      }
      ptx::WgmmaCommit();
      if (i > 0) {
        ptx::WgmmaWait<1>();
        // Of stages that nobody loads into again nobody is told.
        if (i - 1 + kSmallStages < params.steps) Release(thread, last);
      }
      last = stage;
      if (++stage == kSmallStages) {
        stage = 0;
        parity ^= 1;
      }
    }
    ptx::WgmmaWait<0>();
  }

  // ---- Products of matrices in shared memory ----

  // Of box (i, k) of a left operand, or (k, i) of a right one: stored as is, or as its transpose.
  __device__ __forceinline__ static constexpr uint64_t BoxOf(int i, int k) {
    return (k > i ? BoxOffset(kRank, k, i) : BoxOffset(kRank, i, k)) >> 4;
  }

  template <int kTransA, int kTransB>
  __device__ __forceinline__ static void MultiplyBox(float (&acc)[32], uint64_t a, uint64_t b,
                                                     bool first) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      ptx::Wgmma<T, 64, kTransA, kTransB>(acc, a + k * ((kTransA != 0 ? 2048 : 32) >> 4),
                                          b + k * ((kTransB != 0 ? 2048 : 32) >> 4),
                                          k > 0 || !first ? 1 : 0);
    }
  }

  __device__ __forceinline__ void MultiplyPlaces(float (&acc)[32], const SmallOp& op) const {
    const uint64_t left = ptx::MatrixDescriptor(boxes + PlaceOffset(op.a), kBoxBytes);
    const uint64_t right = ptx::MatrixDescriptor(boxes + PlaceOffset(op.b), kBoxBytes);
    ptx::WgmmaFence();
#pragma unroll
    for (int kb = 0; kb < kStrips; ++kb) {
      const bool ta = kb > kBox.row;
      const bool tb = kb > kBox.col;
      const uint64_t a = left + BoxOf(kBox.row, kb);
      const uint64_t b = right + BoxOf(kBox.col, kb);
      if (ta && tb) MultiplyBox<1, 1>(acc, a, b, kb == 0);
      if (ta && !tb) MultiplyBox<1, 0>(acc, a, b, kb == 0);
      if (!ta && tb) MultiplyBox<0, 1>(acc, a, b, kb == 0);
      if (!ta && !tb) MultiplyBox<0, 0>(acc, a, b, kb == 0);
    }
    ptx::WgmmaCommit();
    ptx::WgmmaWait<0>();
  }

  // ---- Between products ----

  // What arrives during an op is announced at its beginning.
  __device__ __forceinline__ void Begin(const SmallOp& op, bool stores, int thread) const {
    if (kGroup != 0 || thread != 0) return;
    if (kCtas == 2 && !stores) {
      const int count = Partial(op.out) ? kReceivedPartial : kReceived;
      ptx::BarrierArriveExpect(exchanged, count * kBoxBytes);
    }
    if (op.moves) {
      // The partner has the same matrix.
      ptx::BarrierArriveExpect(moved, kNeededBoxes * kBoxBytes);
#pragma unroll
      for (int row = 0; row < kStrips; ++row) {
#pragma unroll
        for (int col = 0; col <= row; ++col) {
          const uint32_t to = BoxOffset(kPeer, row, col);
          if (to >= kNeededBoxes * kBoxBytes) continue;
          ptx::SharedCopy(ptx::ClusterAddress(boxes + PlaceOffset(kPartialPlace) + to, kPeer),
                          boxes + PlaceOffset(op.out) + BoxOffset(kRank, row, col), kBoxBytes,
                          ptx::ClusterAddress(moved, kPeer));
        }
      }
    }
  }

  __device__ __forceinline__ void AddAddends(float (&acc)[32], const SmallOp& op, float alpha,
                                             const GroupThread& thread) const {
    float scale = alpha;
    if (op.c2 != kNoPlace) {
      AddBox<T>(acc, scale, op.beta2, Own(op.c2), thread);
      scale = 1;
    }
    if (op.c != kNoPlace) {
      AddBox<T>(acc, scale, op.beta, Own(op.c), thread);
    } else {
#pragma unroll
      for (int i = 0; i < 32; ++i) acc[i] *= scale;
    }
  }

  // The finished box into its place here and at the partner's.
  __device__ __forceinline__ void Keep(const uint32_t (&packed)[16], const SmallOp& op,
                                       const GroupThread& thread) const {
    const uint32_t own = Own(op.out);
    if constexpr (kDiagonal) {
      StageDiagonal(packed, thread, own);
    } else {
      StageBox(packed, thread, own);
    }
    ptx::FenceProxyAsync();
    if constexpr (kCtas == 2) {
      // A warp has written its 16 rows, and of a box on the diagonal those of others too.
      if constexpr (kDiagonal) {
        ptx::NamedBarrierSync(2 + kGroup, 128);
      } else {
        __syncwarp();
      }
      constexpr int kIndex = SmallBoxIndex(kStrips, kPeer, kBox.row, kBox.col);
      if (thread.lane == 0 && !(Partial(op.out) && kIndex >= kNeededBoxes)) {
        constexpr uint32_t kBytes = kBoxBytes / 4;
        const uint32_t to = boxes + PlaceOffset(op.out) + kIndex * kBoxBytes + thread.warp * kBytes;
        ptx::SharedCopy(ptx::ClusterAddress(to, kPeer), own + thread.warp * kBytes, kBytes,
                        ptx::ClusterAddress(exchanged, kPeer));
      }
    }
  }

  // The box of the result into device memory, and its mirror image.
  __device__ __forceinline__ void Store(const uint32_t (&packed)[16], const SmallOp& op,
                                        const GroupThread& thread) const {
    const uint32_t own = Own(op.out);
    const uint32_t mirror = Own(op.mirror);
    if constexpr (kDiagonal) {
      StageDiagonal(packed, thread, own);
    } else {
      StageBox(packed, thread, own);
      StageMirror(packed, thread, mirror);
    }
    ptx::FenceProxyAsync();
    ptx::NamedBarrierSync(2 + kGroup, 128);
    if (thread.thread == 0) {
      ptx::TensorStore(&params.result, own, kBox.col * 64, kBox.row * 64, matrix);
      if constexpr (!kDiagonal) {
        ptx::TensorStore(&params.result, mirror, kBox.row * 64, kBox.col * 64, matrix);
      }
      ptx::BulkCommit();
      ptx::BulkWaitRead<0>();
    }
  }

  // What follows a product, up to the beginning of the next one. `k`: how many there were before;
  // `stores`: the result goes to device memory.
  __device__ __forceinline__ void Finish(float (&acc)[32], const SmallOp& op, float alpha, int k,
                                         bool stores, uint32_t& moves,
                                         const GroupThread& thread) const {
    if (op.moves) {
      ptx::BarrierWait(moved, moves & 1);
      ++moves;
    }
    // Nobody writes into a place before everybody has read it.
    ptx::ClusterArrive();
    AddAddends(acc, op, alpha, thread);
    uint32_t packed[16];
    RoundBox<T>(acc, kDiagonal ? op.diagonal : 0.0F, thread, packed);
    ptx::ClusterWait();
    if (stores) {
      Store(packed, op, thread);
      return;
    }
    Keep(packed, op, thread);
    if constexpr (kCtas == 2) ptx::BarrierWait(exchanged, k & 1);
    ptx::NamedBarrierSync(1, Cta::kGroups * 128);
  }

  __device__ void Consume() const {
    const GroupThread thread = ThisGroupThread();
    uint32_t moves = 0;
    ptx::WaitForPrevious();
    {
      const SmallOp& op = params.op[0];
      Begin(op, false, thread.thread);
      float acc[32];
      MultiplyGram(acc, thread.thread);
      Finish(acc, op, Load(params.gram_alpha, matrix), 0, false, moves, thread);
    }
    for (int k = 1; k <= params.ops; ++k) {
      const SmallOp& op = params.op[k];
      const bool stores = k == params.ops && !params.applies;
      Begin(op, stores, thread.thread);
      float acc[32];
      MultiplyPlaces(acc, op);
      Finish(acc, op, op.alpha, k, stores, moves, thread);
    }
  }
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_SMALL_WORKER_CUH_
