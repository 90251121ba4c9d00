// Limits a line of the log to one a second, however often a stranger causes it.
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
  // nullopt: do not log this time. Else log, and say how many times were passed over since the last
  // line.
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
