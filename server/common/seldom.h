// Lets a line into the log once a second at most, however often a stranger gives cause for it.
// Threads: one.
#ifndef DMUOND_SERVER_COMMON_SELDOM_H_
#define DMUOND_SERVER_COMMON_SELDOM_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

namespace dmuond::server {

class Seldom {
 public:
  // How many causes were passed over since the last line; unset: this one is, too.
  std::optional<int64_t> Now(std::chrono::steady_clock::time_point now) {
    if (now < next_) {
      ++passed_over_;
      return std::nullopt;
    }
    next_ = now + std::chrono::seconds(1);
    return std::exchange(passed_over_, 0);
  }

 private:
  std::chrono::steady_clock::time_point next_{};
  int64_t passed_over_ = 0;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_COMMON_SELDOM_H_
