// The file of dmuond-lane, opened once when the daemon starts. All lanes are started from this
// descriptor, so that a file that replaces it, or is missing for a moment, does not become a lane
// of a job that began with this one.
//
// It is opened for reading, though nothing is read by it: an NFS client keeps a file that its own
// machine replaces or removes for as long as it is open there, and O_PATH does not open it: lanes
// would meet ESTALE. (Where another machine removes the file, its server keeps nothing for us.)
//
// Who writes into the very file, which an upgrade does not, changes it: lanes then differ, and
// scheduler::LaneSet::CheckBits() refuses them.
//
// Threads: any.
#ifndef DMUOND_SERVER_DAEMON_LANES_LANE_BINARY_H_
#define DMUOND_SERVER_DAEMON_LANES_LANE_BINARY_H_

#include <fcntl.h>

#include <cerrno>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"

namespace dmuond::server {

class LaneBinary {
 public:
  LaneBinary() = default;  // of a daemon that starts no lanes
  explicit LaneBinary(std::string path)
      : path_(std::move(path)),
        file_(std::make_shared<wire::UniqueFd>(::open(path_.c_str(), O_RDONLY | O_CLOEXEC))),
        error_(file_->valid() ? 0 : errno) {}

  // As it was given.
  [[nodiscard]] const std::string& path() const { return path_; }
  // NOT_FOUND, PERMISSION_DENIED, …: it could not be opened.
  [[nodiscard]] absl::StatusOr<int> file() const {
    if (file_ == nullptr) return absl::NotFoundError("no program for lanes was named");
    if (error_ != 0) return absl::ErrnoToStatus(error_, absl::StrCat("starting lane ", path_));
    return file_->get();
  }

 private:
  std::string path_;
  std::shared_ptr<const wire::UniqueFd> file_;
  int error_ = 0;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_LANES_LANE_BINARY_H_
