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
// Of one step along k.
inline constexpr int kTileK = 64;
// Columns that a stage of the ring has room for, in units: there are three kernels.
constexpr int StageUnits(int tile_n) {
  return tile_n > 2 * kTileUnit ? 4 : tile_n > kTileUnit ? 2 : 1;
}
// What the tiles of a pair have in common, and load once: columns one above the other (B), or rows
// side by side (A, which is the larger part of what a narrow tile reads).
enum class PairSharing : uint8_t { kColumns, kRows };
constexpr PairSharing SharingOf(int tile_n) {
  return tile_n == kTileUnit ? PairSharing::kRows : PairSharing::kColumns;
}

// One tile of one matrix, with what a CTA needs to begin it. Both CTAs of a pair take the same
// number of steps along k.
struct alignas(16) GemmJob {
  int32_t batch = 0;
  uint16_t problem = 0;
  uint16_t row = 0;          // in units of kTileM
  uint16_t col = 0;          // in units of kTileUnit
  uint16_t stages = 0;       // of the ring: a step of kTileK along k each, or two
  uint8_t width = 0;         // 1 to 4 units of kTileUnit; 0: the list ends here
  bool paired : 1 = false;   // the pair shares loads as PairSharing says
  bool store : 1 = true;     // false: this CTA only keeps its partner company
  bool a_in_b : 1 = false;   // A's rows are among B's columns, in the same memory: loaded once
  bool doubled : 1 = false;  // two steps along k in a stage
  bool symmetric : 1 = false;
  bool has_c : 1 = false;
  bool has_c2 : 1 = false;
  bool store_lower : 1 = false;  // as GemmProblem says
  // A block of a tile of the diagonal, beside which its upper half has room: 0, or 1 + 3 * (row of
  // another tile of the diagonal) + (0, 1, 2: its first, second, third block of 64 x 64).
  uint16_t guest = 0;
};
static_assert(sizeof(GemmJob) == 16);
inline constexpr int64_t kProblemsMax = 65535;
inline constexpr int64_t kStepsMax = 65535;

struct GemmShape {
  int64_t rows = 0;  // of D
  int64_t cols = 0;
  int64_t depth = 0;  // k
  int64_t batch = 1;
  bool symmetric = false;
  bool same_operands = false;  // B is A's transpose, in the same memory
  bool has_c = false;
  bool has_c2 = false;
  bool store_lower = false;
};

// The lower form of a symmetric matrix has the blocks of 64 x 64 on and below the diagonal, and
// this many above it. These let a tile read an operand from one side of the diagonal in every step
// along k.
inline constexpr int kBandBlocks = 2;

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
