// The senders of a product's kernel, a warp for each consumer, so that consumers wait for no store:
// a tile's scalars to the consumer before, its D and mirror images from the ring after.
#ifndef DMUOND_KERNELS_CUDA_GEMM_SENDER_CUH_
#define DMUOND_KERNELS_CUDA_GEMM_SENDER_CUH_

#include "kernels/cuda/gemm_cta.cuh"

namespace dmuond::kernels::cuda {

template <int kTileN, bool kUpdate>
struct GemmSender : GemmCta<kTileN> {
  using Cta = GemmCta<kTileN>;
  using Cta::ChunkBox;
  using Cta::Columns;
  using Cta::empty;
  using Cta::Job;
  using Cta::kUnit;
  using Cta::MirrorBox;
  using Cta::MirrorInRing;
  using Cta::params;
  using Cta::Problem;
  using Cta::scalars;
  using Cta::UpdateAt;
  using typename Cta::Position;

  __device__ __forceinline__ void Send(int consumer) const {
    const bool elected = ptx::Elect();
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

  // A chunk from a stage of the ring, and its mirror image if that lies there too.
  __device__ __forceinline__ void SendChunk(const GemmJob& job, int consumer, int chunk,
                                            uint32_t stage) const {
    const DeviceProblem& problem = Problem(job.problem);
    const auto [row, col] = Cta::ChunkAt(job, consumer, chunk);
    if (!job.symmetric || col != row) {
      ptx::TensorStore(&problem.d, ChunkBox(stage, consumer, chunk), col, row, job.batch);
    }
    if (job.symmetric && MirrorInRing(chunk) && Cta::StoresMirror(job.store_lower, row, col)) {
      ptx::TensorStore(&problem.d, MirrorBox(stage, consumer, chunk), row, col, job.batch);
    }
    ptx::BulkCommit();
  }

  // A tile's mirror images that lie in boxes of their own.
  __device__ __forceinline__ void SendStaged(const GemmJob& job, int consumer, int chunks) const {
    const DeviceProblem& problem = Problem(job.problem);
    for (int chunk = 0; job.symmetric && chunk < chunks; ++chunk) {
      if (MirrorInRing(chunk)) continue;
      const auto [row, col] = Cta::ChunkAt(job, consumer, chunk);
      if (!Cta::StoresMirror(job.store_lower, row, col)) continue;
      ptx::TensorStore(&problem.d, MirrorBox(0, consumer, chunk), row, col, job.batch);
    }
    ptx::BulkCommit();
  }
};

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_GEMM_SENDER_CUH_
