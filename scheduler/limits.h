// Every limit of the planner, with its reason.
#ifndef DMUOND_SCHEDULER_LIMITS_H_
#define DMUOND_SCHEDULER_LIMITS_H_

#include <cstdint>
#include <limits>

namespace dmuond::scheduler {

inline constexpr int kDimsMax = 8;  // as in kernels: a strided box has room for eight dimensions

// Elements of one parameter: byte counts of eight times this still fit in 63 bits.
inline constexpr int64_t kElementsMax = int64_t{1} << 56;

// A name goes into every error message and every snapshot's table of contents.
inline constexpr int64_t kNameBytesMax = 1024;

// Group epochs are 32 bits of every attempt's number and only grow. What somebody says of a larger
// one is refused, so that a group never comes to where they would begin at 0 again.
inline constexpr uint32_t kEpochMax = std::numeric_limits<uint32_t>::max() - (1U << 16);

inline constexpr int32_t kWorldMax = 1 << 16;
inline constexpr int32_t kLanesMax = 1 << 16;
inline constexpr int32_t kParametersMax = 1 << 20;

// Boxes that a parameter falls apart into. Layouts of practice have at most one per trainer; boxes
// chosen out of malice have the square of that.
inline constexpr int64_t kCellsPerParameterMax = 1 << 18;

// Units have 32-bit ids and a few hundred bytes each.
inline constexpr int64_t kUnitsMax = int64_t{1} << 22;

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
