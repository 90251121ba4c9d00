// Which start of all ranks together this process belongs to, for Resume::kDiscard.
#ifndef DMUOND_CLIENT_CPP_SRC_LAUNCH_H_
#define DMUOND_CLIENT_CPP_SRC_LAUNCH_H_

#include <string>

#include "absl/status/status.h"
#include "dmuond/client/options.h"

namespace dmuond::client {

// DMUOND_LAUNCH, or what torchrun and Slurm have set; empty where that says nothing. The Python
// client (dmuond/launch.py) makes the same name.
[[nodiscard]] std::string LaunchFromEnvironment();

// INVALID_ARGUMENT: a session that discards must belong to a launch.
[[nodiscard]] absl::Status CheckLaunch(const Options& options);

}  // namespace dmuond::client

#endif  // DMUOND_CLIENT_CPP_SRC_LAUNCH_H_
