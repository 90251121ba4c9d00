// What the inputs of a fuzz target have led to, all together. A target that no longer gets there
// tests nothing: at its end it says so and aborts.
//
//   Reached reached(1000, {"plans", "commits"});  // judged from 1,000 inputs on
//   reached.NextInput();
//   ++reached["plans"];
//
// Threads: any.
#ifndef DMUOND_TESTS_FUZZ_REACHED_H_
#define DMUOND_TESTS_FUZZ_REACHED_H_

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <map>
#include <string_view>

namespace dmuond {

class Reached {
 public:
  using Count = std::atomic<int64_t>;

  // `names` must outlive it.
  Reached(int64_t inputs_min, std::initializer_list<std::string_view> names)
      : inputs_min_(inputs_min) {
    for (const std::string_view name : names) counts_.try_emplace(name, 0);
  }
  ~Reached() {
    if (inputs_ < inputs_min_) return;
    bool all = true;
    for (const auto& [name, count] : counts_) {
      std::fprintf(stderr, "%.*s %lld\n", static_cast<int>(name.size()), name.data(),
                   static_cast<long long>(count.load()));  // NOLINT
      all = all && count > 0;
    }
    if (all) return;
    std::fprintf(stderr, "no input leads to what has 0\n");
    std::abort();
  }
  Reached(const Reached&) = delete;
  Reached& operator=(const Reached&) = delete;

  void NextInput() { ++inputs_; }
  // REQUIRES: one of the names.
  Count& operator[](std::string_view name) { return counts_.at(name); }

 private:
  const int64_t inputs_min_;
  Count inputs_ = 0;
  std::map<std::string_view, Count> counts_;
};

}  // namespace dmuond

#endif  // DMUOND_TESTS_FUZZ_REACHED_H_
