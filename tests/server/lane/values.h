// Numbers for tests of lanes.
#ifndef DMUOND_TESTS_SERVER_LANE_VALUES_H_
#define DMUOND_TESTS_SERVER_LANE_VALUES_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "kernels/cpu/cpu_memory.h"

namespace dmuond::server::lane::testing {

// A number in (-0.5, 0.5) that depends on all three.
inline float Value(int32_t rank, int32_t parameter, int64_t index) {
  uint64_t x = (static_cast<uint64_t>(rank) << 48) ^ (static_cast<uint64_t>(parameter) << 40) ^
               static_cast<uint64_t>(index);
  x = (x + 0x9e3779b97f4a7c15U) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 29)) * 0x94d049bb133111ebU;
  return static_cast<float>(static_cast<double>((x >> 11) & 0xffffff) / 0x1000000 - 0.5);
}

inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

inline bool SameBits(const std::vector<std::vector<float>>& a,
                     const std::vector<std::vector<float>>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!SameBits(a[i], b[i])) return false;
  }
  return true;
}

class HostMemory {
 public:
  explicit HostMemory(size_t bytes) {
    kernels::cpu::CpuMemoryHolder holder;
    fd_ = *holder.Allocate(bytes, "test");
    mapping_ = *kernels::cpu::MapShared(fd_.get(), bytes);
  }
  [[nodiscard]] int fd() const { return fd_.get(); }
  [[nodiscard]] void* data() const { return mapping_->data(); }
  [[nodiscard]] float* floats() const { return reinterpret_cast<float*>(mapping_->data()); }

 private:
  wire::UniqueFd fd_;
  std::unique_ptr<kernels::Mapping> mapping_;
};

}  // namespace dmuond::server::lane::testing

#endif  // DMUOND_TESTS_SERVER_LANE_VALUES_H_
