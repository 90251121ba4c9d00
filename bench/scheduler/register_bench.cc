// How long a trainer with many parameters waits before it can train, on a real daemon and its lane:
// medians over --rounds of OpenSession, RegisterLayout and AttachBuffers, and the most memory that
// the daemon and its lane have had.
//
//   register_bench [--parameters=10000] [--rounds=7]
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "dmuond/client/session.h"
#include "tests/client/daemon_process.h"

ABSL_FLAG(int32_t, parameters, 10'000, "of the one trainer: seven of ten are matrices");
ABSL_FLAG(int32_t, rounds, 7, "jobs, one after the other on one daemon");

namespace dmuond::bench {
namespace {

using Clock = std::chrono::steady_clock;

// Seven matrices of different shapes and three vectors, time and again. They are small: memory, of
// which a GiB takes a third of a second, is not what is measured.
absl::StatusOr<client::Layout> ManyParameters(int32_t count) {
  client::LayoutBuilder builder(1);
  builder.AddGroup({.preset = "keller"});
  for (int64_t i = 0; i < count; ++i) {
    const bool matrix = i % 10 < 7;
    builder.Add({.name = absl::StrCat("layers.", i / 10, ".parameter.", i % 10),
                 .shape = matrix ? client::Extents{8 * (1 + i % 10), 8} : client::Extents{8},
                 .route = matrix ? client::Route::kMuon : client::Route::kAdamW});
  }
  return builder.Build();
}

double MostMemoryMiB(const std::string& pid) {
  std::ifstream status("/proc/" + pid + "/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return std::strtod(line.c_str() + 6, nullptr) / 1024;
  }
  return 0;
}

std::string Child(pid_t parent) {
  std::ifstream children(absl::StrCat("/proc/", parent, "/task/", parent, "/children"));
  std::string child;
  children >> child;
  for (const auto& task :
       std::filesystem::directory_iterator(absl::StrCat("/proc/", parent, "/task"))) {
    std::ifstream of_task(task.path() / "children");
    std::string pid;
    while (of_task >> pid) child = pid;
  }
  return child;
}

double Milliseconds(Clock::duration time) {
  return std::chrono::duration<double, std::milli>(time).count();
}

absl::Status Measure(int32_t parameters, int32_t rounds) {
  auto daemon = testing::DaemonProcess::Start();
  if (!daemon.ok()) return daemon.status();
  absl::StatusOr<client::Layout> layout = ManyParameters(parameters);
  if (!layout.ok()) return layout.status();
  std::vector<double> times[3];
  for (int32_t round = 0; round < rounds; ++round) {
    const Clock::time_point begin = Clock::now();
    auto session =
        client::Session::Open({.address = (*daemon)->address(), .job = absl::StrCat("job", round)});
    if (!session.ok()) return session.status();
    const Clock::time_point opened = Clock::now();
    if (auto registered = (*session)->Register(*layout); !registered.ok()) {
      return registered.status();
    }
    const Clock::time_point registered = Clock::now();
    if (absl::Status attached = (*session)->Attach(); !attached.ok()) return attached;
    const Clock::time_point attached = Clock::now();
    times[0].push_back(Milliseconds(opened - begin));
    times[1].push_back(Milliseconds(registered - opened));
    times[2].push_back(Milliseconds(attached - registered));
    if (round + 1 == rounds) {
      const std::string lane = Child((*daemon)->pid());
      std::printf("# most memory: daemon %.1f MiB, lane %.1f MiB\n",
                  MostMemoryMiB(absl::StrCat((*daemon)->pid())), MostMemoryMiB(lane));
    }
    if (absl::Status closed = (*session)->Close(); !closed.ok()) return closed;
  }
  std::printf("%-10s %12s %12s %12s\n", "", "first", "median", "least");
  const char* names[] = {"open", "register", "attach"};
  for (int i = 0; i < 3; ++i) {
    const double first = times[i].front();
    std::sort(times[i].begin(), times[i].end());
    std::printf("%-10s %9.1f ms %9.1f ms %9.1f ms\n", names[i], first,
                times[i][times[i].size() / 2], times[i].front());
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace dmuond::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  const int32_t parameters = absl::GetFlag(FLAGS_parameters);
  std::printf("# one trainer of %d parameters\n", parameters);
  const absl::Status measured = dmuond::bench::Measure(parameters, absl::GetFlag(FLAGS_rounds));
  if (measured.ok()) return 0;
  std::fprintf(stderr, "%s\n", measured.ToString().c_str());
  return 1;
}
