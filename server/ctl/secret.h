// The secret of a group of daemons, as a file.
#ifndef DMUOND_SERVER_CTL_SECRET_H_
#define DMUOND_SERVER_CTL_SECRET_H_

#include <string>

#include "absl/status/status.h"

namespace dmuond::server::ctl {

// Writes a new secret, 64 hexadecimal digits, into a file that this user alone can read. After an
// error there is no file.
// ALREADY_EXISTS: there is a file, which stays as it is.
[[nodiscard]] absl::Status MakeSecretFile(const std::string& path);

}  // namespace dmuond::server::ctl

#endif  // DMUOND_SERVER_CTL_SECRET_H_
