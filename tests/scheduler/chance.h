// Chance from a seed, the same on every machine: what simulated schedules are made of.
#ifndef DMUOND_TESTS_SCHEDULER_CHANCE_H_
#define DMUOND_TESTS_SCHEDULER_CHANCE_H_

#include <cstdint>

namespace dmuond::scheduler::testing {

inline uint64_t Mix(uint64_t x) {  // splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

class Chance {
 public:
  explicit Chance(uint64_t seed) : state_(Mix(seed)) {}
  uint64_t Random() { return Mix(state_ += 0x9e3779b97f4a7c15ULL); }
  // Both ends included.
  int64_t Pick(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(Random() % static_cast<uint64_t>(high - low + 1));
  }
  bool Of(int32_t percent) { return Pick(0, 99) < percent; }

 private:
  uint64_t state_;
};

}  // namespace dmuond::scheduler::testing

#endif  // DMUOND_TESTS_SCHEDULER_CHANCE_H_
