#include "bench/common/program.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "grpcpp/grpcpp.h"
#include "kernels/cpu/core_type.h"
#include "server/version.h"

ABSL_FLAG(std::string, json, "", "write the results to this file, too (-J FILE is the same)");
ABSL_FLAG(int32_t, trainer_rank, -1, "internal: be this trainer");

namespace dmuond::bench {
namespace {

using nlohmann::json;

std::string CpuName() {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    if (absl::StartsWith(line, "model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown processor";
}

json PrintMachine(const std::string& name) {
  utsname system{};
  ::uname(&system);
  double load = 0;
  ::getloadavg(&load, 1);
  const char* core_type = std::getenv(kernels::cpu::kCoreTypeVariable);
  const std::string cpu = CpuName();
  const std::string version = server::kBuildVersion;
  std::printf("# %s of dmuond %s, g++ %s, gRPC %s\n", name.c_str(), version.c_str(), __VERSION__,
              grpc::Version().c_str());
  std::printf("# %s, %d cores, Linux %s, OpenBLAS core type %s, load before: %.2f\n", cpu.c_str(),
              ThreadsOr(0), system.release, core_type == nullptr ? "its own choice" : core_type,
              load);
  return {{"dmuond", version},
          {"compiler", __VERSION__},
          {"grpc", grpc::Version()},
          {"cpu", cpu},
          {"cores", ThreadsOr(0)},
          {"kernel", system.release},
          {"core_type", core_type == nullptr ? "" : core_type},
          {"load_before", load}};
}

absl::Status Measure(const Program& program) {
  json results = {{"machine", PrintMachine(program.name)}};
  if (absl::Status status = program.measure(results); !status.ok()) return status;
  const std::string path = absl::GetFlag(FLAGS_json);
  if (path.empty()) return absl::OkStatus();
  std::ofstream file(path);
  file << results.dump(2) << "\n";
  file.close();
  return file ? absl::OkStatus() : absl::InternalError(absl::StrCat(path, " cannot be written"));
}

}  // namespace

int ThreadsOr(int32_t threads) {
  return threads > 0 ? threads : static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
}

int RunProgram(const Program& program, int argc, char** argv) {
  absl::SetProgramUsageMessage(program.usage);
  static char json_flag[] = "--json";
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "-J") argv[i] = json_flag;
  }
  absl::ParseCommandLine(argc, argv);
  const int32_t rank = absl::GetFlag(FLAGS_trainer_rank);
  const absl::Status status = rank >= 0 ? program.train(rank) : Measure(program);
  if (status.ok()) return 0;
  std::cerr << (rank >= 0 ? absl::StrCat("trainer ", rank) : program.name) << ": " << status
            << "\n";
  return 1;
}

}  // namespace dmuond::bench
