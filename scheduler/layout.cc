#include "scheduler/layout.h"

#include "absl/strings/str_cat.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler {

const char* Name(Route route) {
  switch (route) {
    case Route::kMuon:
      return "muon";
    case Route::kAdamW:
      return "adamw";
    case Route::kTrainer:
      return "trainer";
  }
  return "unknown";
}

const char* Name(ElementType type) {
  switch (type) {
    case ElementType::kF32:
      return "float32";
    case ElementType::kBF16:
      return "bfloat16";
    case ElementType::kF16:
      return "float16";
  }
  return "unknown";
}

const char* Name(Contribution contribution) {
  switch (contribution) {
    case Contribution::kSum:
      return "sum";
    case Contribution::kSame:
      return "same";
    case Contribution::kNone:
      return "none";
  }
  return "unknown";
}

int64_t SizeOf(ElementType type) { return type == ElementType::kF32 ? 4 : 2; }

absl::Status SliceEnd(const Slice& slice, const Box& box, ElementType type, int64_t& end_bytes) {
  const auto overflow = [&] {
    return Error(absl::StatusCode::kInvalidArgument, "LAYOUT_INVALID",
                 Say("slice at byte ", Named("offset_bytes", slice.offset_bytes), " of box ",
                     Named("box", ToString(box)), " overflows 63 bits"));
  };
  if (slice.offset_bytes < 0) {
    return Error(absl::StatusCode::kInvalidArgument, "LAYOUT_INVALID",
                 Say("slice of box ", Named("box", ToString(box)), " at negative offset ",
                     Named("offset_bytes", slice.offset_bytes)));
  }
  if (slice.strides.size() != box.begin.size()) {
    return Error(absl::StatusCode::kInvalidArgument, "LAYOUT_INVALID",
                 Say("slice of box ", Named("box", ToString(box)), " has ",
                     Named("strides", slice.strides.size()), " strides for ",
                     Named("dimensions", box.begin.size()), " dimensions"));
  }
  end_bytes = slice.offset_bytes;
  if (Empty(box)) return absl::OkStatus();
  int64_t last = 0;  // element index of the last element
  for (size_t d = 0; d < box.begin.size(); ++d) {
    int64_t step = 0;
    if (slice.strides[d] < 0) {
      return Error(absl::StatusCode::kInvalidArgument, "LAYOUT_INVALID",
                   Say("slice of box ", Named("box", ToString(box)), " has negative stride ",
                       Named("stride", slice.strides[d])));
    }
    if (__builtin_mul_overflow(box.end[d] - box.begin[d] - 1, slice.strides[d], &step) ||
        __builtin_add_overflow(last, step, &last)) {
      return overflow();
    }
  }
  int64_t bytes = 0;
  if (__builtin_add_overflow(last, int64_t{1}, &last) ||
      __builtin_mul_overflow(last, SizeOf(type), &bytes) ||
      __builtin_add_overflow(slice.offset_bytes, bytes, &end_bytes)) {
    return overflow();
  }
  return absl::OkStatus();
}

}  // namespace dmuond::scheduler
