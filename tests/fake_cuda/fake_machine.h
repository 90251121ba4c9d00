// A machine with GPUs, for the processes that a test starts: the fake driver's, with uuids that no
// other test's machine has. The daemon may have no context there.
#ifndef DMUOND_TESTS_FAKE_CUDA_FAKE_MACHINE_H_
#define DMUOND_TESTS_FAKE_CUDA_FAKE_MACHINE_H_

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "kernels/cpu/core_type.h"

namespace dmuond::testing {

// Environment variables, as long as it lives. Threads: one, before others use the environment.
class Environment {
 public:
  Environment() = default;
  ~Environment() {
    for (const auto& [name, value] : before_) {
      if (value.has_value()) {
        ::setenv(name.c_str(), value->c_str(), 1);
      } else {
        ::unsetenv(name.c_str());
      }
    }
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;
  void Set(const std::string& name, const std::string& value) {
    const char* const before = std::getenv(name.c_str());
    before_.emplace(name, before == nullptr ? std::nullopt : std::optional<std::string>(before));
    ::setenv(name.c_str(), value.c_str(), 1);
  }

 private:
  std::map<std::string, std::optional<std::string>> before_;
};

class FakeMachine : public Environment {
 public:
  explicit FakeMachine(int devices) {
    const auto programs = std::filesystem::read_symlink("/proc/self/exe").parent_path();
    Set("LD_LIBRARY_PATH", programs.parent_path() / "fake_cuda");
    Set("FAKE_CUDA_DEVICES", std::to_string(devices));
    Set("FAKE_CUDA_MACHINE", std::to_string(::getpid()));
    Set("FAKE_CUDA_NO_CONTEXT", "dmuond");
    // As a lane on the CPU has it, for the same bits.
    Set("OPENBLAS_NUM_THREADS", "1");
    const std::string core_type = kernels::cpu::LaneCoreType();
    if (!core_type.empty()) Set(kernels::cpu::kCoreTypeVariable, core_type);
  }

  // --lane_binary, for daemons of this machine.
  static std::string LaneFlag() {
    const auto programs = std::filesystem::read_symlink("/proc/self/exe").parent_path();
    return "--lane_binary=" + (programs / "dmuond-lane-fake").string();
  }
  // Of a device, by its number on the machine.
  static std::string Uuid(int device) {
    const auto machine = static_cast<unsigned>(::getpid());
    char text[64];
    std::snprintf(text, sizeof(text), "GPU-%02x%02x%02x%02x-f4f5-f6f7-f8f9-fafbfcfdfe%02x",
                  machine & 0xFF, machine >> 8 & 0xFF, machine >> 16 & 0xFF, machine >> 24, device);
    return text;
  }
};

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_FAKE_CUDA_FAKE_MACHINE_H_
