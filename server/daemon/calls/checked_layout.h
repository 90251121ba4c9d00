// Checks what one trainer registers, without regard to others: numbers, boxes, groups. It depends
// on its arguments alone, so a large layout is checked without the daemon's lock.
#ifndef DMUOND_SERVER_DAEMON_CALLS_CHECKED_LAYOUT_H_
#define DMUOND_SERVER_DAEMON_CALLS_CHECKED_LAYOUT_H_

#include "absl/status/statusor.h"
#include "dmuond/v1/peer.pb.h"
#include "dmuond/v1/trainer.pb.h"
#include "scheduler/layout.h"

namespace dmuond::server {

struct CheckedLayout {
  v1::Registration wire;
  scheduler::Registration layout;
};

// `who` is a registration that says whose it is, and has no layout yet. LAYOUT_INVALID names the
// parameter or group, and the values.
[[nodiscard]] absl::StatusOr<CheckedLayout> CheckLayout(v1::Registration who,
                                                        const v1::RegisterLayoutRequest& request);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_CALLS_CHECKED_LAYOUT_H_
