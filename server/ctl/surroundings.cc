#include "server/ctl/surroundings.h"

#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "dmuond/wire/socket_path.h"
#include "server/common/mps_control.h"

namespace dmuond::server::ctl {
namespace {

// With which the process was started. Empty: it cannot be read.
std::vector<std::string> EnvironmentOf(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/environ"), std::ios::binary);
  std::vector<std::string> environment;
  for (std::string entry; std::getline(file, entry, '\0');) environment.push_back(entry);
  return environment;
}

std::vector<std::string> OwnEnvironment() {
  std::vector<std::string> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) environment.emplace_back(*entry);
  return environment;
}

// Lanes of a daemon that runs a control daemon of MPS have that folder, whatever the daemon itself
// was started with.
void UseManagedMps(const std::string& socket, Surroundings& around) {
  const std::string folder = socket + MpsControl::kFolderSuffix;
  const absl::StatusOr<pid_t> listener = MpsControl::ListenerIn(folder);
  if (!listener.ok() || *listener == 0) return;
  around.mps_control = *listener;
  for (const auto& [name, value] : MpsControl::VariablesOf(folder)) {
    const std::string begin = name + "=";
    std::erase_if(around.environment,
                  [&](const std::string& entry) { return entry.starts_with(begin); });
    around.environment.push_back(begin + value);
  }
}

}  // namespace

absl::StatusOr<wire::UniqueFd> ConnectTo(const std::string& path, int type) {
  ASSIGN_OR_RETURN(const sockaddr_un address, wire::SocketAddress(path));
  wire::UniqueFd socket(::socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  if (!socket.valid() ||
      ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return absl::ErrnoToStatus(errno, path);
  }
  return socket;
}

std::optional<std::string> Surroundings::Variable(const std::string& name) const {
  const std::string begin = name + "=";
  for (const std::string& entry : environment) {
    if (entry.starts_with(begin)) return entry.substr(begin.size());
  }
  return std::nullopt;
}

std::string Surroundings::Whose() const {
  if (of_daemon) return absl::StrCat("the daemon (pid ", daemon, ")");
  if (!daemon_answers) return "this command, for no daemon answers";
  return "this command, for the daemon's cannot be read from here";
}

Surroundings LookAround(const std::string& socket) {
  Surroundings around;
  if (const auto connection = ConnectTo(socket, SOCK_STREAM); connection.ok()) {
    around.daemon_answers = true;
    ucred peer{};
    socklen_t size = sizeof(peer);
    if (::getsockopt(connection->get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0) {
      around.daemon = peer.pid;
    }
  }
  if (around.daemon > 0) {
    around.environment = EnvironmentOf(around.daemon);
    around.of_daemon =
        !around.environment.empty() &&
        ::prlimit(around.daemon, RLIMIT_MEMLOCK, nullptr, &around.locked_memory) == 0;
  }
  if (!around.of_daemon) {
    around.environment = OwnEnvironment();
    ::getrlimit(RLIMIT_MEMLOCK, &around.locked_memory);
  }
  if (around.daemon_answers) UseManagedMps(socket, around);
  return around;
}

}  // namespace dmuond::server::ctl
