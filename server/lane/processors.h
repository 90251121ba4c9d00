// Which processors a lane runs on: those near its device, so that its threads, and the pinned
// memory that they touch first, lie on the device's side of the machine.
#ifndef DMUOND_SERVER_LANE_PROCESSORS_H_
#define DMUOND_SERVER_LANE_PROCESSORS_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace dmuond::server::lane {

// Keeps the calling thread, and threads that it starts from now on, to the processors of `list`
// that it may use: "0-15,32-47", as the kernel writes it. Does nothing where it may use none of
// them: a batch system may have given the job others. INVALID_ARGUMENT: it is no such list.
[[nodiscard]] absl::Status StayNear(absl::string_view list);

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_PROCESSORS_H_
