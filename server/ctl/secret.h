// The secret of a group of daemons, as a file.
#ifndef DMUOND_SERVER_CTL_SECRET_H_
#define DMUOND_SERVER_CTL_SECRET_H_

#include <string>

#include "absl/status/status.h"

namespace dmuond::server::ctl {

// Makes a file of this user's alone with a new secret, 64 hexadecimal digits, whole or not at all.
// ALREADY_EXISTS: there is a file, which stays as it is.
[[nodiscard]] absl::Status MakeSecretFile(const std::string& path);

}  // namespace dmuond::server::ctl

#endif  // DMUOND_SERVER_CTL_SECRET_H_
