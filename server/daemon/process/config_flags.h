// dmuond's flags, one for each field of ConfigFile with the same name, plus config, print_config
// and check_config. Part of config.h.
#ifndef DMUOND_SERVER_DAEMON_PROCESS_CONFIG_FLAGS_H_
#define DMUOND_SERVER_DAEMON_PROCESS_CONFIG_FLAGS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/daemon/process/config.pb.h"

namespace dmuond::server {

struct ParsedFlags {
  config::ConfigFile defaults;  // every field
  config::ConfigFile given;     // those on the command line
  std::string config_path;      // empty: no file
  bool print_config = false;
  bool check_config = false;
  std::string help;                   // to be printed; empty: --help was not asked for
  bool version = false;               // --version was asked for
  std::vector<std::string> mistakes;  // what could not be read, one sentence each
};

// INTERNAL: flags and fields do not fit each other.
[[nodiscard]] absl::StatusOr<ParsedFlags> ParseFlags(int argc, char** argv);

// Sets the field from text as it stands on a command line. INVALID_ARGUMENT naming both.
[[nodiscard]] absl::Status SetField(const google::protobuf::FieldDescriptor& field,
                                    const std::string& text, config::ConfigFile& file);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_PROCESS_CONFIG_FLAGS_H_
