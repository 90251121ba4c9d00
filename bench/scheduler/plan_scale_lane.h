// A lane with its program, in a process of its own, up to where it would wait for its rail.
#ifndef DMUOND_BENCH_SCHEDULER_PLAN_SCALE_LANE_H_
#define DMUOND_BENCH_SCHEDULER_PLAN_SCALE_LANE_H_

#include <chrono>
#include <cstdio>
#include <ctime>
#include <string>

#include "dmuond/v1/lane_program.pb.h"

namespace dmuond::bench {

// Of /proc/self/status: "VmRSS", or "VmHWM".
[[nodiscard]] double MemoryMiB(const std::string& field);

// Times of the clock and of the processor, which says more where others compute, too.
class Stopwatch {
 public:
  void Start() {
    clock_ = std::chrono::steady_clock::now();
    processor_ = std::clock();
  }
  // Adds what has passed since Start().
  void Stop() {
    clock_ms_ +=
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - clock_)
            .count();
    processor_ms_ += 1e3 * static_cast<double>(std::clock() - processor_) / CLOCKS_PER_SEC;
  }
  void Print(const char* stage) const {
    std::printf("%-20s %8.1f ms %8.1f ms CPU %7.1f MiB now %7.1f MiB at most\n", stage, clock_ms_,
                processor_ms_, MemoryMiB("VmRSS"), MemoryMiB("VmHWM"));
  }

 private:
  std::chrono::steady_clock::time_point clock_;
  std::clock_t processor_ = 0;
  double clock_ms_ = 0;
  double processor_ms_ = 0;
};

// Runs `work` and prints a line of what it took.
template <typename Work>
auto Timed(const char* stage, Work work) {
  Stopwatch watch;
  watch.Start();
  auto result = work();
  watch.Stop();
  watch.Print(stage);
  return result;
}

// Starts this program again, as that lane, and waits for it.
void RunAsLane(const v1::LaneProgram& program);

// A process started with kAsLane and a path acts as the lane; BeLane runs it and returns its exit
// code.
inline constexpr char kAsLane[] = "--as_lane";
int BeLane(const std::string& path);

}  // namespace dmuond::bench

#endif  // DMUOND_BENCH_SCHEDULER_PLAN_SCALE_LANE_H_
