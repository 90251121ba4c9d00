#include "server/ctl/command.h"

#include <iostream>

#include "server/common/errors.h"

namespace dmuond::server::ctl {

int Fail(const absl::Status& status) {
  std::cerr << "dmuonctl: " << status.message();
  const std::string reason = ReasonOf(status);
  if (!reason.empty()) std::cerr << " [" << reason << "]";
  std::cerr << "\n";
  return kExitFailed;
}

int FailUsage(const std::string& message) {
  std::cerr << "dmuonctl: " << message << "\n";
  return kExitUsage;
}

}  // namespace dmuond::server::ctl
