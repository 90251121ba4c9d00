// What is taken for granted of the CUDA driver, statement by statement: one line for each, with a
// verdict and what was seen. Ends with 1 where one does not hold, with 2 where there is no driver.
//
//   driver_contracts            all of them
//   driver_contracts NAME...    these
//
// It needs nothing but libcuda.so.1: the driver's, or the fake one (LD_LIBRARY_PATH).
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/fake_cuda/contracts/contract.h"

namespace dmuond::contracts {
namespace {

constexpr int kLimitMs = 20000;  // of one statement

void PrintDevices() {
  const int count = Devices();
  int version = 0;
  MUST(cuDriverGetVersion, &version);
  std::printf("# driver for CUDA %d.%d, %d device(s):", version / 1000, version % 1000 / 10, count);
  for (int device = 0; device < count; ++device) {
    char name[128];
    MUST(cuDeviceGetName, name, sizeof(name), device);
    std::printf(" %s", name);
  }
  std::printf("\n");
}

const char* Name(Verdict verdict) {
  if (verdict == Verdict::kSkipped) return "skipped";
  return verdict == Verdict::kHolds ? "holds" : "FAILS";
}

// In a process of its own, since the driver has state that only the process's end clears.
Seen InAProcess(const Contract& contract) {
  int ends[2];
  if (::pipe(ends) != 0) return Fails("pipe");
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::setpgid(0, 0);
    ::close(ends[0]);
    Seen seen;
    try {
      seen = contract.check();
    } catch (const Broken& broken) {
      seen = Fails(broken.what);
    }
    const std::string message = static_cast<char>('0' + static_cast<int>(seen.verdict)) + seen.what;
    const bool written = ::write(ends[1], message.data(), message.size()) > 0;
    ::_exit(written ? 0 : 1);
  }
  ::close(ends[1]);
  pollfd answer{ends[0], POLLIN, 0};
  char bytes[4096];
  ssize_t size = 0;
  const bool in_time = ::poll(&answer, 1, kLimitMs) > 0;
  if (in_time) size = ::read(ends[0], bytes, sizeof(bytes));
  ::close(ends[0]);
  ::kill(-pid, SIGKILL);
  ::kill(pid, SIGKILL);
  int status = 0;
  ::waitpid(pid, &status, 0);
  if (size > 0) {
    return {static_cast<Verdict>(bytes[0] - '0'), std::string(bytes + 1, size - 1)};
  }
  if (!in_time) return Fails(Text("has not ended after %d s", kLimitMs / 1000));
  return Fails(WIFSIGNALED(status) ? Text("ended by signal %d", WTERMSIG(status))
                                   : std::string("ended without an answer"));
}

bool Wanted(const Contract& contract, int argc, char** argv) {
  return argc < 2 || std::any_of(argv + 1, argv + argc, [&](const char* name) {
           return std::strcmp(name, contract.name) == 0;
         });
}

int Run(int argc, char** argv) {
  if (::fork() == 0) {  // this process stays without a driver, and can fork
    try {
      PrintDevices();
    } catch (const Broken& broken) {
      std::fprintf(stderr, "driver_contracts: %s\n", broken.what.c_str());
      ::_exit(1);
    }
    std::fflush(stdout);
    ::_exit(0);
  }
  int status = 0;
  ::wait(&status);
  if (status != 0) return 2;
  int counts[3] = {};
  const double begin = NowMs();
  for (const Contract& contract : Contracts()) {
    if (!Wanted(contract, argc, argv)) continue;
    const double start = NowMs();
    const Seen seen = InAProcess(contract);
    ++counts[static_cast<int>(seen.verdict)];
    std::printf("%-7s  %-40s  %s%s%s  [%.0f ms]\n", Name(seen.verdict), contract.name,
                contract.statement, seen.what.empty() ? "" : ": ", seen.what.c_str(),
                NowMs() - start);
    std::fflush(stdout);
  }
  std::printf("# %d hold, %d fail, %d skipped, in %.1f s\n", counts[0], counts[1], counts[2],
              (NowMs() - begin) / 1000);
  return counts[1] == 0 ? 0 : 1;
}

}  // namespace
}  // namespace dmuond::contracts

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);
  return dmuond::contracts::Run(argc, argv);
}
