#include "server/lane/functions.h"

#include <cmath>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "scheduler/digest.h"

namespace dmuond::server::lane {
namespace {

constexpr int kArguments = 3'000;  // of each kind

// Arguments from a fixed row of numbers, spread evenly.
class Arguments {
 public:
  double Between(double low, double high) {
    state_ = state_ * 6364136223846793005 + 1442695040888963407;
    return low + (high - low) * (static_cast<double>(state_ >> 11) * 0x1p-53);
  }
  // Of all magnitudes from 2^low to 2^high.
  double Magnitude(int low, int high) {
    const int exponent = static_cast<int>(std::floor(Between(low, high)));
    return std::ldexp(Between(1, 2), exponent);
  }

 private:
  uint64_t state_ = 1;
};

}  // namespace

std::string FunctionsDigest(double (*pow)(double, double), double (*log2)(double)) {
  scheduler::Digest digest;
  Arguments arguments;
  // Betas of 0.5 to 1 - 1e-6, of steps up to some millions.
  for (int i = 0; i < kArguments; ++i) {
    const double beta = 1 - arguments.Magnitude(-20, -1);
    digest.Add(pow(beta, std::floor(arguments.Magnitude(0, 22))));
  }
  // The betas that people use, at the steps at which most jobs are.
  for (const double beta : {0.9, 0.95, 0.98, 0.99, 0.995, 0.999}) {
    for (int step = 1; step <= kArguments / 10; ++step) digest.Add(pow(beta, step));
  }
  // Norms and scales, to small powers of either sign.
  for (int i = 0; i < kArguments; ++i) {
    const double base = arguments.Magnitude(-60, 60);
    digest.Add(pow(base, std::floor(arguments.Between(-8, 9))));
    digest.Add(log2(base));
  }
  return absl::StrCat("pow, log2 ", absl::Hex(digest.value(), absl::kZeroPad16));
}

std::string FunctionsDigest() {
  return FunctionsDigest([](double base, double exponent) { return std::pow(base, exponent); },
                         [](double value) { return std::log2(value); });
}

}  // namespace dmuond::server::lane
