// The bytes of a small file: settings, secrets, certificates.
#ifndef DMUOND_SERVER_COMMON_WHOLE_FILE_H_
#define DMUOND_SERVER_COMMON_WHOLE_FILE_H_

#include <cerrno>
#include <fstream>
#include <sstream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace dmuond::server {

// The error is what a sentence about the file ends with: "cannot be read: Permission denied".
inline absl::StatusOr<std::string> WholeFile(const std::string& path) {
  std::ifstream file(path);
  if (file) file.peek();  // a directory can be opened, and not be read
  if (!file.is_open() || file.bad()) return absl::ErrnoToStatus(errno, "cannot be read");
  std::stringstream bytes;
  bytes << file.rdbuf();
  return bytes.str();
}

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_COMMON_WHOLE_FILE_H_
