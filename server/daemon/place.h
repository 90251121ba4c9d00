// A place for a job: its core, and the calls of those who are concerned with the job.
#ifndef DMUOND_SERVER_DAEMON_PLACE_H_
#define DMUOND_SERVER_DAEMON_PLACE_H_

#include <cstdint>

#include "server/daemon/calls/admin_calls.h"
#include "server/daemon/calls/attach_calls.h"
#include "server/daemon/calls/check_calls.h"
#include "server/daemon/calls/sample_calls.h"
#include "server/daemon/calls/session_calls.h"
#include "server/daemon/calls/snapshot_calls.h"
#include "server/daemon/calls/step_calls.h"
#include "server/daemon/calls/tensor_calls.h"
#include "server/daemon/calls/trace_calls.h"
#include "server/daemon/core.h"
#include "server/daemon/memory/node_device.h"

namespace dmuond::server {

struct Place {
  Place(const DaemonOptions& options, NodeDevice& device, int32_t number)
      : core(options, device, number) {}

  Core core;
  SessionCalls sessions{core};
  AttachCalls buffers{core};
  TensorCalls tensors{core};
  StepCalls steps{core, tensors};
  SnapshotCalls snapshots{core};
  AdminCalls admin{core};
  TraceCalls traces{core};
  SampleCalls samples{core};
  CheckCalls checks{core};
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_PLACE_H_
