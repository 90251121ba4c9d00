#include "server/common/human.h"

#include <array>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace dmuond::server {

std::string HumanBytes(int64_t bytes) {
  constexpr std::array<const char*, 6> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? absl::StrCat(bytes, " B") : absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string HumanMicroseconds(double us) {
  if (us < 1000) return absl::StrFormat("%.0f us", us);
  if (us < 1e6) return absl::StrFormat("%.1f ms", us / 1e3);
  return absl::StrFormat("%.2f s", us / 1e6);
}

std::string HumanSeconds(int64_t seconds) {
  if (seconds < 60) return absl::StrFormat("%ds", seconds);
  if (seconds < 3600) return absl::StrFormat("%dm %02ds", seconds / 60, seconds % 60);
  return absl::StrFormat("%dh %02dm", seconds / 3600, seconds / 60 % 60);
}

std::string HumanPercent(double fraction) { return absl::StrFormat("%.2f %%", fraction * 100); }

}  // namespace dmuond::server
