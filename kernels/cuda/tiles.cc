#include "kernels/cuda/tiles.h"

#include <algorithm>
#include <cstdint>

namespace dmuond::kernels::cuda {
namespace {

constexpr int kClusters = 66;
// A batch of more tiles than this is wide enough for any tile; schedules of so many are not
// compared.
constexpr int64_t kTilesMax = 4096;

}  // namespace

GemmTile TileFor(const GemmProblem& problem, GemmLayout layout) {
  // Whole products take one turn, and more are slower than tiles; fewer than this fit into one turn
  // of the narrowest tiles, which begin sooner (as measured on an H200).
  constexpr int64_t kWholeMin = 45;
  if (problem.batch >= kWholeMin && problem.batch <= kClusters &&
      Fits(GemmTile::kWhole, problem, layout)) {
    return GemmTile::kWhole;
  }
  const GemmShape shape = ShapeOf(problem, layout);
  const int64_t tiles = ((shape.rows + 127) / 128) * ((shape.cols + 255) / 256) * shape.batch;
  if (tiles > kTilesMax) return GemmTile::k256;
  GemmTile best = GemmTile::k256;
  int64_t cycles = 0;
  for (const GemmTile tile : kGemmTiles) {
    if (tile == GemmTile::kWhole) continue;
    const int64_t expected = MakeSchedule({&shape, 1}, Columns(tile), kClusters).cycles;
    if (cycles == 0 || expected < cycles) {
      best = tile;
      cycles = expected;
    }
  }
  return best;
}

}  // namespace dmuond::kernels::cuda
