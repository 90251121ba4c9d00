// What is taken for granted of the CUDA driver, statement by statement: one line for each, with a
// verdict and what was seen. Ends with 1 where one does not hold, with 2 where there is no driver.
//
//   driver_contracts                       all of them
//   driver_contracts NAME...               these
//   driver_contracts --json PATH [NAME...]  and writes them to a file
//
// It needs nothing but libcuda.so.1: the driver's, or the fake one (LD_LIBRARY_PATH).
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/fake_cuda/contracts/contract.h"

namespace dmuond::contracts {
namespace {

constexpr int kLimitMs = 20000;  // of one statement

// "CUDA 13.0, 1 device: NVIDIA H200, MPS 0". In a process of its own: this one stays without a
// driver, and can fork.
std::string DescribeDevices() {
  Child asked([](Channel& parent) {
    const int count = Devices();
    int version = 0;
    MUST(cuDriverGetVersion, &version);
    std::string text = Text("CUDA %d.%d, %d device%s:", version / 1000, version % 1000 / 10, count,
                            count == 1 ? "" : "s");
    for (int device = 0; device < count; ++device) {
      char name[128];
      MUST(cuDeviceGetName, name, sizeof(name), device);
      text += Text("%s %s", device == 0 ? "" : ",", name);
    }
    parent.Send(text + Text(", MPS %d", Attribute(CU_DEVICE_ATTRIBUTE_MPS_ENABLED)));
  });
  return asked.channel().Receive();
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

bool Wanted(const Contract& contract, const std::vector<std::string>& names) {
  return names.empty() || std::find(names.begin(), names.end(), contract.name) != names.end();
}

bool WriteJson(const std::string& path, const std::string& driver, const nlohmann::json& rows) {
  std::ofstream file(path);
  file << nlohmann::json{{"driver", driver}, {"contracts", rows}}.dump(1) << "\n";
  file.close();
  if (!file) std::fprintf(stderr, "driver_contracts: cannot write %s\n", path.c_str());
  return file.good();
}

int Run(std::vector<std::string> arguments) {
  std::string json;
  if (arguments.size() >= 2 && arguments[0] == "--json") {
    json = arguments[1];
    arguments.erase(arguments.begin(), arguments.begin() + 2);
  }
  const std::string driver = DescribeDevices();
  std::printf("# %s\n", driver.c_str());
  nlohmann::json rows = nlohmann::json::array();
  int counts[3] = {};
  const double begin = NowMs();
  for (const Contract& contract : Contracts()) {
    if (!Wanted(contract, arguments)) continue;
    const double start = NowMs();
    const Seen seen = InAProcess(contract);
    const double took = NowMs() - start;
    ++counts[static_cast<int>(seen.verdict)];
    std::printf("%-7s  %-40s  %s%s%s  [%.0f ms]\n", Name(seen.verdict), contract.name,
                contract.statement, seen.what.empty() ? "" : ": ", seen.what.c_str(), took);
    std::fflush(stdout);
    rows.push_back({{"name", contract.name},
                    {"statement", contract.statement},
                    {"verdict", Name(seen.verdict)},
                    {"seen", seen.what},
                    {"ms", std::round(took)}});
  }
  std::printf("# %d hold, %d fail, %d skipped, in %.1f s\n", counts[0], counts[1], counts[2],
              (NowMs() - begin) / 1000);
  if (!json.empty() && !WriteJson(json, driver, rows)) return 2;
  return counts[1] == 0 ? 0 : 1;
}

}  // namespace
}  // namespace dmuond::contracts

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);
  try {
    return dmuond::contracts::Run({argv + 1, argv + argc});
  } catch (const dmuond::contracts::Broken& broken) {
    std::fprintf(stderr, "driver_contracts: %s\n", broken.what.c_str());
    return 2;
  }
}
