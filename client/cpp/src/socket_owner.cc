#include "client/cpp/src/socket_owner.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "client/cpp/src/status.h"
#include "dmuond/wire/socket_path.h"

namespace dmuond::client {
namespace {

absl::Status Check(const std::string& what, uid_t owner, std::optional<uid_t> server_uid) {
  if (owner == 0 || owner == ::geteuid() || owner == server_uid) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kPermissionDenied, kSocketOwner,
      absl::StrCat(what, " is that of uid ", owner, ", neither root's nor this process's (uid ",
                   ::geteuid(),
                   "), and might be a stranger's who waits for tokens. If that user "
                   "runs the daemon, say so: DMUOND_SERVER_UID=",
                   owner, ", or server_uid"),
      {{"path", what}, {"uid", absl::StrCat(owner)}, {"own_uid", absl::StrCat(::geteuid())}});
}

absl::Status CheckFile(const std::string& path, std::optional<uid_t> server_uid) {
  struct stat found {};
  if (::stat(path.c_str(), &found) != 0) return absl::ErrnoToStatus(errno, path);
  return Check(path, found.st_uid, server_uid);
}

}  // namespace

absl::Status CheckSocketOwner(const std::string& path, int attach,
                              std::optional<uid_t> server_uid) {
  const std::string directory = path.substr(0, path.rfind('/'));
  absl::Status status = CheckFile(directory.empty() ? "/" : directory, server_uid);
  if (status.ok()) status = CheckFile(path, server_uid);
  if (!status.ok()) return status;
  // Who listens there, whatever lies at the path by now.
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (::getsockopt(attach, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    return absl::ErrnoToStatus(errno, "SO_PEERCRED");
  }
  return Check(absl::StrCat(path, wire::kAttachSuffix), peer.uid, server_uid);
}

}  // namespace dmuond::client
