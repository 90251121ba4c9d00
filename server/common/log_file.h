// The log in a file in place of stderr. Threads: any.
#ifndef DMUOND_SERVER_COMMON_LOG_FILE_H_
#define DMUOND_SERVER_COMMON_LOG_FILE_H_

#include <string>

#include "absl/status/status.h"

namespace dmuond::server::log {

// Appends further lines to the file at `path`, which is made where it is not there (mode 0640).
// Call it again when the file was renamed. An error names the path, and changes nothing.
[[nodiscard]] absl::Status WriteTo(const std::string& path);

}  // namespace dmuond::server::log

#endif  // DMUOND_SERVER_COMMON_LOG_FILE_H_
