#include "kernels/ops.h"

#include <algorithm>
#include <cmath>

namespace dmuond::kernels {

size_t SizeOf(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

const char* Name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "float32";
    case DType::kBF16:
      return "bfloat16";
    case DType::kF16:
      return "float16";
  }
  return "unknown";
}

absl::StatusOr<std::unique_ptr<Mapping>> Device::MapHandle(const HandleMemory&) {
  return absl::UnimplementedError("this device has no handles of other processes' memory");
}

int64_t NormBlocks(int64_t first_element, int64_t elements) {
  if (elements <= 0) return 0;
  return (first_element + elements - 1) / kNormBlock - first_element / kNormBlock + 1;
}

double UpdateScale(ScaleRule rule, int64_t rows, int64_t cols) {
  const auto m = static_cast<double>(rows);
  const auto n = static_cast<double>(cols);
  switch (rule) {
    case ScaleRule::kMatchRmsAdamW:
      return 0.2 * std::sqrt(std::max(m, n));
    case ScaleRule::kOriginal:
      return std::sqrt(std::max(1.0, m / n));
    case ScaleRule::kSpectral:
      return std::sqrt(m / n);
    case ScaleRule::kNone:
      return 1.0;
  }
  return 1.0;
}

bool Ops::CopiesByEngine(const StridedBox&, const StridedBox&) const { return true; }

absl::Status Ops::PrepareMuon(Stream& /*stream*/, const MuonBatch& /*batch*/, void* /*workspace*/) {
  return absl::OkStatus();
}

absl::Status Ops::UseChoices(std::span<const KernelChoice>) { return absl::OkStatus(); }

}  // namespace dmuond::kernels
