// The folder in which `dmuonctl run` has its daemon serve: this user's alone, and gone afterwards.
//
// A runner holds a lock on a file in its folder, and the lock ends with the runner's process.
// Make() removes folders whose runner was killed. It leaves alone a folder without that file, and
// one whose daemon still runs: a daemon that is leaving lives longer than its runner.
#ifndef DMUOND_SERVER_CTL_PRIVATE_DIR_H_
#define DMUOND_SERVER_CTL_PRIVATE_DIR_H_

#include <string>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace dmuond::server::ctl {

class PrivateDir {
 public:
  // In $XDG_RUNTIME_DIR, or in /tmp where there is none. INVALID_ARGUMENT: the paths of sockets
  // there would be too long, those of a control daemon of MPS with `managed_mps`.
  static absl::StatusOr<PrivateDir> Make(bool managed_mps);
  ~PrivateDir();
  PrivateDir(PrivateDir&& other) noexcept;
  PrivateDir& operator=(PrivateDir&&) = delete;

  // Returns the path of the socket that the daemon is to serve.
  [[nodiscard]] std::string socket() const;
  // Returns the folder that the daemon's control daemon of MPS has, where the daemon runs one.
  [[nodiscard]] std::string mps() const;

 private:
  PrivateDir(std::string path, wire::UniqueFd lock);

  std::string path_;
  wire::UniqueFd lock_;
};

}  // namespace dmuond::server::ctl

#endif  // DMUOND_SERVER_CTL_PRIVATE_DIR_H_
