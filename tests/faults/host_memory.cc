#include "absl/strings/str_cat.h"
#include "tests/faults/trainer_memory.h"

namespace dmuond::testing {

absl::StatusOr<std::unique_ptr<TrainerMemory>> MakeTrainerMemory(const std::string& device,
                                                                 int32_t /*parameters*/) {
  if (device == "cpu") return std::make_unique<TrainerMemory>();
  return absl::InvalidArgumentError(absl::StrCat("--device=", device, " is not cpu"));
}

}  // namespace dmuond::testing
