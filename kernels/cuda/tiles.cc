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
  const GemmShape shape = ShapeOf(problem, layout);
  const int64_t tiles = ((shape.rows + 127) / 128) * ((shape.cols + 255) / 256) * shape.batch;
  if (tiles > kTilesMax) return GemmTile::k256;
  GemmTile best = GemmTile::k256;
  int64_t cycles = 0;
  for (const GemmTile tile : kGemmTiles) {
    const int64_t expected = MakeSchedule({&shape, 1}, Columns(tile), kClusters).cycles;
    if (cycles == 0 || expected < cycles) {
      best = tile;
      cycles = expected;
    }
  }
  return best;
}

}  // namespace dmuond::kernels::cuda
