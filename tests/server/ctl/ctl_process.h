// dmuonctl as a user runs it: its exit code, and what it wrote.
#ifndef DMUOND_TESTS_SERVER_CTL_CTL_PROCESS_H_
#define DMUOND_TESTS_SERVER_CTL_CTL_PROCESS_H_

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace dmuond::testing {

struct CtlResult {
  int code = 0;
  std::string output;
  std::string errors;
  // Fails the test where the output is no JSON.
  [[nodiscard]] nlohmann::json json() const {
    auto parsed = nlohmann::json::parse(output, nullptr, /*allow_exceptions=*/false);
    EXPECT_FALSE(parsed.is_discarded()) << output;
    return parsed;
  }
};

inline std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline std::string CtlProgram() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / "dmuonctl";
}

// REQUIRES: no argument has a single quote.
inline CtlResult RunCtl(const std::vector<std::string>& arguments) {
  std::string pattern = std::filesystem::temp_directory_path() / "dmuonctl-XXXXXX";
  if (::mkdtemp(pattern.data()) == nullptr) std::abort();
  const std::filesystem::path directory = pattern;
  std::string command = "'" + CtlProgram() + "'";
  for (const std::string& argument : arguments) command += " '" + argument + "'";
  command += " >" + (directory / "out").string() + " 2>" + (directory / "err").string();
  const int status = std::system(command.c_str());
  CtlResult result{.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
                   .output = ReadFile(directory / "out"),
                   .errors = ReadFile(directory / "err")};
  std::filesystem::remove_all(directory);
  return result;
}

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_SERVER_CTL_CTL_PROCESS_H_
