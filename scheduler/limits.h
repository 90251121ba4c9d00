// Every limit of the planner, with its reason.
#ifndef DMUOND_SCHEDULER_LIMITS_H_
#define DMUOND_SCHEDULER_LIMITS_H_

#include <cstdint>
#include <limits>

namespace dmuond::scheduler {

inline constexpr int kDimsMax = 8;  // as in kernels: a strided box has room for eight dimensions

// Elements of one parameter, and of all of a job together that muon or adamw train. The largest
// tensors of today's models have 2^34 elements, the largest models 2^40; the state of 2^42 elements
// is 32 TiB or more. Pieces are counted by these, so that who asks for more is refused before
// anything is cut.
inline constexpr int64_t kElementsMax = int64_t{1} << 40;
inline constexpr int64_t kJobElementsMax = int64_t{1} << 42;

// A name goes into every error message and every snapshot's table of contents.
inline constexpr int64_t kNameBytesMax = 1024;

// For jobs, in a group. A session's number has its job's place in its lowest bits, and an attempt's
// counter has it in its highest.
inline constexpr int32_t kPlacesMax = 64;

// Group epochs are 32 bits of every attempt's number and only grow. What somebody says of a larger
// one is refused, so that a group never comes to where they would begin at 0 again.
inline constexpr uint32_t kEpochMax = std::numeric_limits<uint32_t>::max() - (1U << 16);

inline constexpr int32_t kWorldMax = 1 << 16;
inline constexpr int32_t kLanesMax = 1 << 16;
inline constexpr int32_t kParametersMax = 1 << 20;

// Boxes of one parameter that one trainer holds: they are compared with each other. Sharding makes
// one, a flat shard three, heads or experts that do not lie beside each other a few hundred.
inline constexpr int64_t kBoxesPerParameterMax = 1024;
// Boxes that one trainer holds in all: one who holds a whole model of 61 layers of 384 experts has
// 70,000.
inline constexpr int64_t kFragmentsMax = 1 << 18;
// Boxes of all trainers together, which a few bytes can say: about 150 bytes each in memory. A
// model of 61 layers of 384 experts on 1,024 trainers has 3 million.
inline constexpr int64_t kJobFragmentsMax = int64_t{1} << 25;

// Granules of memory; GPUs have 2 MiB.
inline constexpr int64_t kMemoryGranuleMax = int64_t{1} << 40;

// Hyperparameter groups: each step carries the scalars of all of them.
inline constexpr int32_t kGroupsMax = 4096;
// Iterations of Newton-Schulz in a group; presets have five to ten.
inline constexpr int32_t kNewtonSchulzStepsMax = 256;

// Work with which the boxes of all parameters may be arranged, and cells that they may fall apart
// into: so much, and more for each fragment. Shards of practice take four to eight steps and one
// cell for each; boxes chosen out of malice the square.
inline constexpr int64_t kArrangeWorkMin = int64_t{1} << 23;
inline constexpr int64_t kArrangeWorkPerFragment = 64;
inline constexpr int64_t kCellsMin = int64_t{1} << 16;
inline constexpr int64_t kCellsPerFragment = 2;

// Pairs of a matrix and a trainer's box that reaches into it, in a job: lists of the plan have an
// entry for each. A model of 23,000 experts on 1,024 trainers of 8 experts each has 24 million.
inline constexpr int64_t kMatrixHoldersMax = int64_t{1} << 26;

// Boxes that a parameter falls apart into. Layouts of practice have at most one per trainer; boxes
// chosen out of malice have the square of that.
inline constexpr int64_t kCellsPerParameterMax = 1 << 18;

// Matrices of a job. A model of 61 layers of 384 experts has 70,000.
inline constexpr int64_t kMatricesMax = int64_t{1} << 18;
// Matrices and pieces: a few hundred bytes each. Vectors that thousands of trainers hold in shards
// make more of them than matrices do.
inline constexpr int64_t kUnitsMax = int64_t{1} << 20;

// One 64-bit word each in the timeline page of a trainer, twice (ready and published).
inline constexpr int32_t kBucketsMax = 4096;

// Replicated AdamW tensors are cut at multiples of this, the block of the sums of squares, so that
// the global norm has the same bits however many lanes there are.
inline constexpr int64_t kPieceCut = 65536;
// A piece in the update needs one spare slot of its size.
inline constexpr int64_t kPieceElementsMax = int64_t{1} << 24;
// Smaller replicated tensors are not cut: 1 MiB in fp32, half a microsecond of memory traffic.
inline constexpr int64_t kPieceWholeMax = 4 * kPieceCut;

// Matrices in one batch. Beyond this the fixed cost of a launch no longer shows.
inline constexpr int32_t kBatchMax = 64;

// Everything in a lane's memory starts at a multiple of this (vector loads, coalesced access).
inline constexpr int64_t kAlignment = 256;

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_LIMITS_H_
