// dmuonctl secret new FILE: what daemons of a group prove to each other that they know.
#include "server/ctl/secret.h"

#include <stdlib.h>
#include <unistd.h>

#include <cerrno>
#include <iostream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"
#include "server/ctl/command.h"
#include "server/ctl/to_json.h"
#include "server/daemon/group/peer_secret.h"

namespace dmuond::server::ctl {

absl::Status MakeSecretFile(const std::string& path) {
  // Written beside it and linked: several that make it at once, in a directory that machines share
  // too, end up with one secret.
  std::string beside = path + ".XXXXXX";
  const wire::UniqueFd file(::mkstemp(beside.data()));  // mode 0600
  if (!file.valid()) return absl::ErrnoToStatus(errno, beside);
  const std::string text = absl::BytesToHexString(NewNonce()) + "\n";
  const bool written =
      ::write(file.get(), text.data(), text.size()) == std::ssize(text) && ::fsync(file.get()) == 0;
  absl::Status status = written ? absl::OkStatus() : absl::ErrnoToStatus(errno, beside);
  if (status.ok() && ::link(beside.c_str(), path.c_str()) != 0) {
    status = errno == EEXIST
                 ? absl::AlreadyExistsError(absl::StrCat(
                       path, " is there already and stays as it is: daemons may use it"))
                 : absl::ErrnoToStatus(errno, path);
  }
  ::unlink(beside.c_str());
  return status;
}

int RunSecret(const Options& options, const Arguments& arguments) {
  if (arguments.size() != 2 || arguments[0] != "new") {
    return FailUsage("dmuonctl secret new FILE");
  }
  if (const absl::Status made = MakeSecretFile(arguments[1]); !made.ok()) return Fail(made);
  if (options.json) {
    PrintJson({{"file", arguments[1]}});
    return kExitOk;
  }
  std::cout
      << arguments[1]
      << " holds a new secret. Bring it, readable by the daemon's user alone, to every node of "
         "the group: --peer_secret_file\n";
  return kExitOk;
}

}  // namespace dmuond::server::ctl
