// Reads a command line of absl flags without ending the process. All mistakes are collected, and
// each flag's text is kept as it was written ("0s" stays "0s").
//
//   const CommandLine line = ReadCommandLine(argc, argv, "server/ctl/main.cc");
//   if (line.help) std::cout << HelpText("server/ctl/main.cc");
//
// Of the program's flags only those that `file` defines are known. Threads: the main one, at the
// start.
#ifndef DMUOND_SERVER_COMMAND_LINE_H_
#define DMUOND_SERVER_COMMAND_LINE_H_

#include <map>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace dmuond::server {

struct CommandLine {
  std::vector<std::string> arguments;        // that are no flags, and all after "--"
  std::map<std::string, std::string> given;  // flag -> text; the last one counts
  std::vector<std::string> mistakes;         // one sentence each, naming flag and value
  bool separated = false;                    // "--" was there
  bool help = false;
  bool version = false;
};

// Sets the flags, too. --name=value, --name value, and for bools --name and --noname.
[[nodiscard]] CommandLine ReadCommandLine(int argc, const char* const* argv,
                                          absl::string_view file);

// Writes out what stands in std::cout at a program's end. The exit code: `code`, or 1 where stdout
// did not take all of it, which is then said on stderr.
[[nodiscard]] int EndOutput(absl::string_view program, int code);

// Every flag that `file` defines, with help and default, by name.
[[nodiscard]] std::string HelpText(absl::string_view file);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_COMMAND_LINE_H_
