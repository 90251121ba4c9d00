// A benchmark that starts itself again as its trainers. It has --json (or -J, as in nccl-tests),
// and
// --trainer_rank, by which a trainer knows that it is one.
#ifndef DMUOND_BENCH_COMMON_PROGRAM_H_
#define DMUOND_BENCH_COMMON_PROGRAM_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "nlohmann/json.hpp"

namespace dmuond::bench {

struct Program {
  std::string name;
  std::string usage;
  // Prints its tables and puts the same figures into `results`, which hold the machine already.
  std::function<absl::Status(nlohmann::json& results)> measure;
  // A trainer's whole work.
  std::function<absl::Status(int32_t rank)> train;
};

// main(): the head lines, then `measure` and the file that --json names; or `train`. The exit code.
int RunProgram(const Program& program, int argc, char** argv);

// --threads, or the number of cores where it is 0.
[[nodiscard]] int ThreadsOr(int32_t threads);

}  // namespace dmuond::bench

#endif  // DMUOND_BENCH_COMMON_PROGRAM_H_
