// A configuration file out of nowhere: it is read, checked as a whole and printed, or refused; and
// what is printed says the same when it is read again.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "server/daemon/process/config.h"
#include "server/daemon/process/config_flags.h"

namespace dmuond::server {
namespace {

// Every field as the flags' defaults give it.
config::ConfigFile Defaults() {
  char name[] = "dmuond";
  char* arguments[] = {name, nullptr};
  absl::StatusOr<ParsedFlags> flags = ParseFlags(1, arguments);
  if (!flags.ok()) std::abort();
  flags->defaults.set_lane_binary("/bin/true");
  flags->defaults.set_socket("/tmp/dmuond-fuzz/dmuond.sock");
  return flags->defaults;
}

// What would be made on this machine, or looked up in its network.
void LeaveTheMachineAlone(config::ConfigFile& values) { values.set_snapshot_dir(""); }

}  // namespace
}  // namespace dmuond::server

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  namespace server = dmuond::server;
  const std::string text(reinterpret_cast<const char*>(data), size);
  const auto given = server::ParseConfigText(text, "fuzz");
  if (!given.ok()) return 0;
  static const auto* const defaults = new dmuond::config::ConfigFile(server::Defaults());
  dmuond::config::ConfigFile values = *defaults;
  server::Override(*given, values);
  server::LeaveTheMachineAlone(values);
  const auto config = server::Check(values);
  if (!config.ok()) return 0;
  const std::string printed = server::ToText(*config);
  const auto again = server::ParseConfigText(printed, "printed");
  if (!again.ok()) std::abort();
  const auto same = server::Check(*again);
  if (!same.ok() || server::ToText(*same) != printed) std::abort();
  return 0;
}
