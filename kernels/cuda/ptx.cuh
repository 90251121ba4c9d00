// The PTX that the Hopper kernels are made of: one small wrapper per instruction, named after it.
// Section numbers are those of the PTX ISA 9.0. Needs sm_90a.
#ifndef DMUOND_KERNELS_CUDA_PTX_CUH_
#define DMUOND_KERNELS_CUDA_PTX_CUH_

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace dmuond::kernels::cuda::ptx {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- Clusters: barrier.cluster (9.7.13.4), mapa (9.7.9.24), %cluster_ctarank (10) ----

__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ uint32_t ClusterId() {
  uint32_t id;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(id));
  return id;
}
__device__ __forceinline__ uint32_t ClusterCount() {
  uint32_t count;
  asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(count));
  return count;
}
// Orders no memory access but what FenceBarrierInit() has made visible: a release would wait for
// every store that is on its way.
__device__ __forceinline__ void ClusterSync() {
  asm volatile(
      "barrier.cluster.arrive.relaxed.aligned;\n"
      "barrier.cluster.wait.aligned;\n" ::
          : "memory");
}

// ---- mbarrier (9.7.13.15) ----

__device__ __forceinline__ void BarrierInit(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine and to the other CTAs of the cluster.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void BarrierArriveExpect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Arrives at the barrier of the same offset in CTA `rank` of the cluster. Orders no memory access
// of the cluster (a release at that scope is a MEMBAR.GPU each time, which trebled the products'
// time): it says that wgmma has read a stage, which its wait has made sure of.
__device__ __forceinline__ void BarrierArriveRemote(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{ .reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote]; }\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// Returns when the phase of the given parity is complete. try_wait suspends the thread for a time
// that the hardware bounds, so this does not spin.
__device__ __forceinline__ void BarrierWait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra WAIT; }\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- bar.sync among some warps of a CTA (9.7.13.1) ----

__device__ __forceinline__ void NamedBarrierSync(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives without waiting.
__device__ __forceinline__ void NamedBarrierArrive(uint32_t id, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- Tensor copies: cp.async.bulk.tensor (9.7.9.25.5), bulk groups (9.7.9.25.3) ----

__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void TensorLoad(uint32_t destination, const CUtensorMap* map,
                                           uint32_t barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// Writes the box to the same offset in every CTA of `cta_mask`, and signals each one's barrier.
__device__ __forceinline__ void TensorLoadMulticast(uint32_t destination, const CUtensorMap* map,
                                                    uint32_t barrier, uint16_t cta_mask, int x,
                                                    int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(destination),
      "l"(map), "r"(barrier), "h"(cta_mask), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void TensorStore(const CUtensorMap* map, uint32_t source, int x, int y,
                                            int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(source), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void BulkCommit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// At most kPending groups of this thread still read shared memory.
template <int kPending>
__device__ __forceinline__ void BulkWaitRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Orders ordinary writes of shared memory before the copy engine's reads (9.7.13.4, membar/fence).
__device__ __forceinline__ void FenceProxyAsync() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- elect.sync (9.7.13.15) ----

// True in one thread of the warp, always the same. The compiler knows that what depends on it runs
// in one thread: without it each copy, whose operands are a warp's, becomes a loop over threads.
__device__ __forceinline__ bool Elect() {
  uint32_t elected;
  asm volatile(
      "{ .reg .pred p; elect.sync _|p, 0xFFFFFFFF;\n"
      "selp.u32 %0, 1, 0, p; }\n"
      : "=r"(elected));
  return elected != 0;
}
// The warp's number in its CTA, known to be the same in all its threads.
__device__ __forceinline__ int WarpIndex() {
  return __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x / 32), 0);
}

// ---- Programmatic dependent launch: griddepcontrol (9.7.13.13) ----

__device__ __forceinline__ void LaunchDependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void WaitForPrevious() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- setmaxnreg (9.7.19.5) ----

template <int kRegisters>
__device__ __forceinline__ void RegistersIncrease() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void RegistersDecrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- ld, st (9.7.9.8, 9.7.9.11): 16 bytes of shared memory ----

__device__ __forceinline__ float4 LoadShared4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ void StoreShared4(uint32_t address, float4 v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w)
               : "memory");
}

// ---- stmatrix (9.7.14.5.16): 8x8 matrices of 16-bit elements from fragments ----

__device__ __forceinline__ void StoreMatrix4(uint32_t row, uint32_t m0, uint32_t m1, uint32_t m2,
                                             uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(m0), "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}
__device__ __forceinline__ void StoreMatrix4Transposed(uint32_t row, uint32_t m0, uint32_t m1,
                                                       uint32_t m2, uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(m0), "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}
// ldmatrix (9.7.14.5.15): four 8x8 matrices into fragments.
__device__ __forceinline__ void LoadMatrix4(uint32_t row, uint32_t (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}
// movmatrix (9.7.14.5.17): the transpose of a fragment.
__device__ __forceinline__ uint32_t TransposeMatrix(uint32_t m) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(m));
  return transposed;
}

// ---- wgmma (9.7.15): matrix products of a warpgroup ----

// Orders register and shared memory accesses before the first wgmma of a group.
__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Shared memory matrix descriptor (9.7.15.5.1) for the 128-byte swizzle. A tile is made of boxes of
// 64 x 128 bytes as the copy engine writes them: 8 rows of 128 bytes are an atom of 1024 bytes.
// `box_stride`: bytes from one box to the next along M or N; read for MN-major operands only.
__device__ __forceinline__ uint64_t MatrixDescriptor(uint32_t address, uint32_t box_stride) {
  constexpr uint64_t kSwizzle128 = 1ULL << 62;
  constexpr uint64_t kAtomBytes = 1024;
  return kSwizzle128 | ((kAtomBytes >> 4) << 32) | (static_cast<uint64_t>(box_stride >> 4) << 16) |
         (address >> 4 & 0x3FFF);
}

// D (64 x N, fp32 in registers) = A * B + (accumulate ? D : 0), A and B of 16-bit elements in
// shared memory. kTransA, kTransB: 1 for M-major A, N-major B.
// clang-format off
#define DMUOND_P32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define DMUOND_P64 DMUOND_P32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define DMUOND_P96 DMUOND_P64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define DMUOND_P128 DMUOND_P96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define DMUOND_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define DMUOND_D32(i) DMUOND_D8(i), DMUOND_D8(i + 8), DMUOND_D8(i + 16), DMUOND_D8(i + 24)
#define DMUOND_D64 DMUOND_D32(0), DMUOND_D32(32)
#define DMUOND_D96 DMUOND_D64, DMUOND_D32(64)
#define DMUOND_D128 DMUOND_D96, DMUOND_D32(96)
// Of N columns: the names of D's registers, the registers, and the names of the operands after them.
#define DMUOND_WGMMA(TYPE, N, NAMES, REGISTERS, A, B, ACCUMULATE, TRANS_A, TRANS_B) \
  asm volatile( \
      "{ .reg .pred p; setp.ne.b32 p, %" ACCUMULATE ", 0;\n" \
      "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" NAMES "}, %" A ", %" B \
      ", p, 1, 1, %" TRANS_A ", %" TRANS_B "; }\n" \
      : REGISTERS \
      : "l"(desc_a), "l"(desc_b), "r"(accumulate), "n"(kTransA), "n"(kTransB))
#define DMUOND_WGMMA_N64(TYPE) DMUOND_WGMMA(TYPE, "64", DMUOND_P32, DMUOND_D32(0), "32", "33", "34", "35", "36")
#define DMUOND_WGMMA_N128(TYPE) DMUOND_WGMMA(TYPE, "128", DMUOND_P64, DMUOND_D64, "64", "65", "66", "67", "68")
#define DMUOND_WGMMA_N192(TYPE) DMUOND_WGMMA(TYPE, "192", DMUOND_P96, DMUOND_D96, "96", "97", "98", "99", "100")
#define DMUOND_WGMMA_N256(TYPE) DMUOND_WGMMA(TYPE, "256", DMUOND_P128, DMUOND_D128, "128", "129", "130", "131", "132")
// clang-format on

template <typename T, int kN, int kTransA, int kTransB, int kRegisters>
__device__ __forceinline__ void Wgmma(float (&d)[kRegisters], uint64_t desc_a, uint64_t desc_b,
                                      int accumulate) {
  static_assert(kN == 64 || kN == 128 || kN == 192 || kN == 256);
  static_assert(kRegisters >= kN / 2);
  static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>);
  if constexpr (std::is_same_v<T, __half>) {
    if constexpr (kN == 64) DMUOND_WGMMA_N64("f16");
    if constexpr (kN == 128) DMUOND_WGMMA_N128("f16");
    if constexpr (kN == 192) DMUOND_WGMMA_N192("f16");
    if constexpr (kN == 256) DMUOND_WGMMA_N256("f16");
  } else {
    if constexpr (kN == 64) DMUOND_WGMMA_N64("bf16");
    if constexpr (kN == 128) DMUOND_WGMMA_N128("bf16");
    if constexpr (kN == 192) DMUOND_WGMMA_N192("bf16");
    if constexpr (kN == 256) DMUOND_WGMMA_N256("bf16");
  }
}
#undef DMUOND_WGMMA_N64
#undef DMUOND_WGMMA_N128
#undef DMUOND_WGMMA_N192
#undef DMUOND_WGMMA_N256
#undef DMUOND_WGMMA
#undef DMUOND_P32
#undef DMUOND_P64
#undef DMUOND_P96
#undef DMUOND_P128
#undef DMUOND_D8
#undef DMUOND_D32
#undef DMUOND_D64
#undef DMUOND_D96
#undef DMUOND_D128

}  // namespace dmuond::kernels::cuda::ptx

#endif  // DMUOND_KERNELS_CUDA_PTX_CUH_
