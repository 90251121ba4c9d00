// Which CTA computes which tile, decided on the host before the launch. A persistent kernel of
// `clusters` pairs of CTAs walks a table: row = turn, column = CTA. Pure; no device.
#ifndef DMUOND_KERNELS_CUDA_GEMM_SCHEDULE_H_
#define DMUOND_KERNELS_CUDA_GEMM_SCHEDULE_H_

#include <cstdint>
#include <span>
#include <vector>

namespace dmuond::kernels::cuda {

inline constexpr int kTileM = 128;
// Columns of tiles are counted in these units.
inline constexpr int kTileUnit = 64;

// One tile of one matrix. Both CTAs of a pair take the same number of steps along k.
struct alignas(16) GemmJob {
  int32_t problem = 0;
  int32_t batch = 0;
  uint16_t row = 0;    // in units of kTileM
  uint16_t col = 0;    // in units of kTileUnit
  uint8_t width = 0;   // 1 to 4 units of kTileUnit; 0: the list ends here
  uint8_t paired = 0;  // the pair works on the same columns and shares the loads of B
  uint8_t store = 1;   // 0: this CTA only keeps its partner company
  uint8_t reserved = 0;
};
static_assert(sizeof(GemmJob) == 16);

struct GemmShape {
  int64_t rows = 0;  // of D
  int64_t cols = 0;
  int64_t depth = 0;  // k
  int64_t batch = 1;
  bool symmetric = false;
};

struct GemmSchedule {
  int turns = 0;
  int clusters = 0;
  // jobs[(turn * clusters + cluster) * 2 + rank]; the last turn holds only ends.
  std::vector<GemmJob> jobs;
  // Work of the busiest cluster over the mean: 1 is perfect.
  double imbalance = 1;
  int64_t cycles = 0;  // that the busiest cluster is expected to take
};

// Each tile goes to the least loaded cluster, the last ones longest first; neighbours in a matrix
// run at the same time so that they find each other's operands in L2.
// `tile_n`: columns of a tile, 64 to 256 in steps of kTileUnit.
[[nodiscard]] GemmSchedule MakeSchedule(std::span<const GemmShape> shapes, int tile_n,
                                        int clusters);

}  // namespace dmuond::kernels::cuda

#endif  // DMUOND_KERNELS_CUDA_GEMM_SCHEDULE_H_
