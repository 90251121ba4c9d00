#include "kernels/cpu/available_memory.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace dmuond::kernels::cpu {
namespace {

namespace fs = std::filesystem;

// Returns what the kernel believes it could still give out.
std::optional<uint64_t> OfMachine(const std::string& root) {
  std::ifstream file(root + "/proc/meminfo");
  std::string key;
  uint64_t kib = 0;
  std::string unit;
  while (file >> key >> kib) {
    std::getline(file, unit);
    if (key == "MemAvailable:") return kib * 1024;
  }
  return std::nullopt;
}

// Names the files in which one version of cgroups keeps what is read here.
struct Version {
  const char* mount;
  const char* limit;
  const char* used;
  std::array<const char*, 2> reclaimable;  // of memory.stat: files that can be read again
};
constexpr Version kV2 = {
    "/sys/fs/cgroup", "memory.max", "memory.current", {"inactive_file", "active_file"}};
constexpr Version kV1 = {"/sys/fs/cgroup/memory",
                         "memory.limit_in_bytes",
                         "memory.usage_in_bytes",
                         {"total_inactive_file", "total_active_file"}};

// nullopt: there is no such file, or it says "max".
std::optional<uint64_t> NumberIn(const fs::path& path) {
  std::ifstream file(path);
  std::string word;
  uint64_t number = 0;
  if (!(file >> word) || !absl::SimpleAtoi(word, &number)) return std::nullopt;
  return number;
}

uint64_t ReclaimableIn(const fs::path& folder, const Version& version) {
  std::ifstream file(folder / "memory.stat");
  std::string key;
  uint64_t bytes = 0;
  uint64_t sum = 0;
  while (file >> key >> bytes) {
    for (const char* name : version.reclaimable) sum += key == name ? bytes : 0;
  }
  return sum;
}

void Narrow(const std::string& root, const Version& version, const std::string& cgroup,
            AvailableMemory& available) {
  // In a container the path may be the host's, and its mount the container's own cgroup alone: what
  // is not there is passed over, up to the mount.
  fs::path path = fs::path(cgroup).relative_path();
  for (;;) {
    const fs::path below = fs::path(version.mount) / path;
    const fs::path folder = root + below.string();
    const std::optional<uint64_t> limit = NumberIn(folder / version.limit);
    const std::optional<uint64_t> used = NumberIn(folder / version.used);
    if (limit.has_value() && used.has_value()) {
      const uint64_t held = *used - std::min(*used, ReclaimableIn(folder, version));
      const uint64_t left = *limit - std::min(*limit, held);
      if (left < available.bytes) {
        available = {left, (below / version.limit).lexically_normal().string(), *limit};
      }
    }
    if (path.empty()) return;
    path = path.parent_path();
  }
}

}  // namespace

std::string AvailableMemory::Words() const {
  if (limited_by.empty()) return absl::StrCat(bytes, " available");
  return absl::StrCat(bytes, " available of ", limit_bytes, " (", limited_by, ")");
}

std::optional<AvailableMemory> ReadAvailableMemory(const std::string& process,
                                                   const std::string& root) {
  const std::optional<uint64_t> machine = OfMachine(root);
  if (!machine.has_value()) return std::nullopt;
  AvailableMemory available{.bytes = *machine};
  std::ifstream file(absl::StrCat(root, "/proc/", process, "/cgroup"));
  // Each line: hierarchy:controllers:path.
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    if (parts[1].empty()) Narrow(root, kV2, parts[2], available);
    for (const absl::string_view controller : absl::StrSplit(parts[1], ',')) {
      if (controller == "memory") Narrow(root, kV1, parts[2], available);
    }
  }
  return available;
}

}  // namespace dmuond::kernels::cpu
