// A 64-bit digest that is the same in every process, on every machine and in every version of the
// standard library. Not cryptographic: it finds daemons that disagree, not attackers.
#ifndef DMUOND_SCHEDULER_DIGEST_H_
#define DMUOND_SCHEDULER_DIGEST_H_

#include <bit>
#include <concepts>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "scheduler/box.h"

namespace dmuond::scheduler {

class Digest {
 public:
  template <std::integral T>
  void Add(T value) {
    // One round of xxHash64.
    state_ ^= std::rotl(static_cast<uint64_t>(value) * kPrime2, 31) * kPrime1;
    state_ = std::rotl(state_, 27) * kPrime1 + kPrime4;
  }
  void Add(double value) { Add(std::bit_cast<uint64_t>(value)); }
  void Add(absl::string_view text) {
    Add(text.size());
    for (char c : text) Add(static_cast<uint8_t>(c));
  }
  void Add(const std::string& text) { Add(absl::string_view(text)); }
  void Add(const Extents& extents) {
    Add(extents.size());
    for (int64_t extent : extents) Add(extent);
  }
  void Add(const Box& box) {
    Add(box.begin);
    Add(box.end);
  }
  [[nodiscard]] uint64_t value() const {
    uint64_t mixed = state_ ^ (state_ >> 33);
    mixed *= kPrime2;
    mixed ^= mixed >> 29;
    mixed *= kPrime3;
    return mixed ^ (mixed >> 32);
  }

 private:
  static constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87;
  static constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4F;
  static constexpr uint64_t kPrime3 = 0x165667B19E3779F9;
  static constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63;
  uint64_t state_ = 0x27D4EB2F165667C5;
};

struct Plan;
struct PlanInputs;

// The digest of a plan and of the inputs that it was made from. It leaves out where fragments lie
// in their arenas, which only their own node knows.
[[nodiscard]] uint64_t DigestOf(const PlanInputs& inputs, const Plan& plan);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_DIGEST_H_
