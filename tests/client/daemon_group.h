// Several daemons of one group on this machine, each with its own socket.
#ifndef DMUOND_TESTS_CLIENT_DAEMON_GROUP_H_
#define DMUOND_TESTS_CLIENT_DAEMON_GROUP_H_

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"
#include "tests/client/daemon_process.h"

namespace dmuond::testing {

// A loopback address that nobody listens on at the moment. Its port is none of those that the
// kernel gives to connections: one would have it before the daemon that is to listen there.
inline std::string FreeAddress() {
  int kernels = 0;  // from here on
  std::ifstream("/proc/sys/net/ipv4/ip_local_port_range") >> kernels;
  constexpr int kFirst = 10'000;
  std::random_device random;
  std::uniform_int_distribution<int> ports(kFirst, std::max(kernels, 2 * kFirst) - 1);
  for (;;) {
    const wire::UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int port = ports(random);
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    at.sin_port = htons(static_cast<uint16_t>(port));
    if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&at), sizeof(at)) == 0) {
      return absl::StrCat("127.0.0.1:", port);
    }
    if (errno != EADDRINUSE) std::abort();
  }
}

// What every group of these tests proves itself by, in a file that ends with this process.
inline constexpr char kGroupSecret[] = "a secret that every daemon of a test's group knows";
inline const std::string& GroupSecretFile() {
  static const struct File {
    File() {
      const wire::UniqueFd file(::mkstemp(path.data()));  // mode 0600
      const bool written = ::write(file.get(), kGroupSecret, sizeof(kGroupSecret) - 1) > 0;
      if (!written) std::abort();
    }
    ~File() { ::unlink(path.c_str()); }
    std::string path = std::filesystem::temp_directory_path() / "dmuond-secret-XXXXXX";
  } file;
  return file.path;
}

// The flags of one of a group's daemons, which has one job at a time.
inline std::vector<std::string> GroupFlags(int node, int nodes, const std::string& coordinator) {
  return {absl::StrCat("--nodes=", nodes),
          absl::StrCat("--node_rank=", node),
          "--coordinator=" + coordinator,
          "--peer_secret_file=" + GroupSecretFile(),
          "--jobs_max=1",
          "--peer_listen=" + (node == 0 ? coordinator : std::string("127.0.0.1:0"))};
}

using DaemonGroup = std::vector<std::unique_ptr<DaemonProcess>>;

// Ready when it returns. `flags` are everybody's.
inline absl::StatusOr<DaemonGroup> StartGroup(int nodes, const std::string& devices,
                                              const std::vector<std::string>& flags = {},
                                              const std::string& coordinator = FreeAddress()) {
  DaemonGroup group;
  for (int node = 0; node < nodes; ++node) {
    std::vector<std::string> all = GroupFlags(node, nodes, coordinator);
    all.insert(all.end(), flags.begin(), flags.end());
    auto daemon =
        DaemonProcess::Start({.devices = devices, .flags = std::move(all), .wait_for = "live"});
    if (!daemon.ok()) return daemon.status();
    group.push_back(*std::move(daemon));
  }
  for (const auto& daemon : group) {
    const absl::Status ready = daemon->WaitServing("ready", kHangsAfter);
    if (!ready.ok()) return ready;
  }
  return group;
}

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_CLIENT_DAEMON_GROUP_H_
