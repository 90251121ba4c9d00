#include "server/command_line.h"

#include <cerrno>
#include <cstring>
#include <iostream>
#include <utility>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"

namespace dmuond::server {
namespace {

// Null: `file` defines none of that name.
absl::CommandLineFlag* Find(absl::string_view name, absl::string_view file) {
  absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
  return flag != nullptr && absl::EndsWith(flag->Filename(), file) ? flag : nullptr;
}

class Reader {
 public:
  Reader(int argc, const char* const* argv, absl::string_view file)
      : words_(argv + 1, argv + argc), file_(file) {}

  CommandLine Read() {
    while (next_ < words_.size()) {
      const std::string word = words_[next_++];
      if (word == "--") {
        line_.separated = true;
        line_.arguments.insert(line_.arguments.end(), words_.begin() + next_, words_.end());
        break;
      }
      if (word.size() > 1 && word[0] == '-') {
        Flag(word);
      } else {
        line_.arguments.push_back(word);
      }
    }
    return std::move(line_);
  }

 private:
  void Flag(const std::string& word) {
    absl::string_view rest = word;
    while (absl::ConsumePrefix(&rest, "-")) {
    }
    const size_t equals = rest.find('=');
    const std::string name(rest.substr(0, equals));
    const bool has_value = equals != absl::string_view::npos;
    if (!has_value && (name == "help" || name == "h")) {
      line_.help = true;
    } else if (!has_value && name == "version") {
      line_.version = true;
    } else if (absl::CommandLineFlag* flag = Find(name, file_); flag != nullptr) {
      Known(*flag, has_value ? std::string(rest.substr(equals + 1)) : "", has_value);
    } else if (!has_value && absl::StartsWith(name, "no") && IsBool(name.substr(2))) {
      Set(*Find(name.substr(2), file_), "false");
    } else {
      line_.mistakes.push_back(absl::StrCat("there is no flag '", word, "' (--help lists them)"));
    }
  }

  [[nodiscard]] bool IsBool(absl::string_view name) const {
    const absl::CommandLineFlag* flag = Find(name, file_);
    return flag != nullptr && flag->IsOfType<bool>();
  }

  void Known(absl::CommandLineFlag& flag, const std::string& value, bool has_value) {
    if (has_value) return Set(flag, value);
    if (flag.IsOfType<bool>()) return Set(flag, "true");
    if (next_ < words_.size()) return Set(flag, words_[next_++]);
    line_.mistakes.push_back(absl::StrCat("--", flag.Name(), " needs a value"));
  }

  void Set(absl::CommandLineFlag& flag, const std::string& value) {
    std::string error;
    if (flag.ParseFrom(value, &error)) {
      line_.given[std::string(flag.Name())] = value;
      return;
    }
    // absl's text repeats flag and value, and only sometimes says more after a semicolon.
    const size_t more = error.find("; ");
    line_.mistakes.push_back(
        absl::StrCat("--", flag.Name(), "=", value, " cannot be read",
                     more == std::string::npos ? "" : ": " + error.substr(more + 2)));
  }

  const std::vector<std::string> words_;
  const absl::string_view file_;
  size_t next_ = 0;
  CommandLine line_;
};

}  // namespace

CommandLine ReadCommandLine(int argc, const char* const* argv, absl::string_view file) {
  return Reader(argc, argv, file).Read();
}

int EndOutput(absl::string_view program, int code) {
  errno = 0;
  std::cout.flush();
  const int error = errno;
  if (std::cout.good()) return code;
  std::cerr << program << ": not all of the output could be written"
            << (error == 0 ? std::string() : absl::StrCat(": ", std::strerror(error))) << "\n";
  return code == 0 ? 1 : code;
}

std::string HelpText(absl::string_view file) {
  std::map<std::string, std::string> lines;
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    if (!absl::EndsWith(flag->Filename(), file)) continue;
    const std::string value = flag->DefaultValue();
    lines[std::string(name)] =
        absl::StrCat("  --", name, value.empty() ? "" : absl::StrCat(" (default: ", value, ")"),
                     "\n      ", absl::StrReplaceAll(flag->Help(), {{"\n", "\n      "}}), "\n");
  }
  std::string text;
  for (const auto& [name, line] : lines) absl::StrAppend(&text, line);
  return text;
}

}  // namespace dmuond::server
