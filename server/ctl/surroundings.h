// Reads the environment and the limits that lanes run with. They are the daemon's, which need not
// be those of the shell that asks.
#ifndef DMUOND_SERVER_CTL_SURROUNDINGS_H_
#define DMUOND_SERVER_CTL_SURROUNDINGS_H_

#include <sys/resource.h>
#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace dmuond::server::ctl {

// Connects to a Unix socket; the error is errno's.
absl::StatusOr<wire::UniqueFd> ConnectTo(const std::string& path, int type);

struct Surroundings {
  bool daemon_answers = false;
  pid_t daemon = 0;                      // 0: none, or none whose pid can be seen from here
  bool of_daemon = false;                // what follows is the daemon's; false: this process's
  std::vector<std::string> environment;  // "NAME=value"; of lanes, as far as MPS goes
  pid_t mps_control = 0;                 // the daemon's own (--mps=managed); 0: it has none
  rlimit locked_memory{};

  [[nodiscard]] std::optional<std::string> Variable(const std::string& name) const;
  // "the daemon (pid 4711)", "this command, for no daemon answers"
  [[nodiscard]] std::string Whose() const;
};

// Returns those of the daemon that serves at `socket`. Where there is none, or this user may not
// read them, it returns those of this process.
[[nodiscard]] Surroundings LookAround(const std::string& socket);

}  // namespace dmuond::server::ctl

#endif  // DMUOND_SERVER_CTL_SURROUNDINGS_H_
