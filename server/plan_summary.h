// A plan in the words of the Admin service: what `dmuonctl plan` shows, online and offline.
#ifndef DMUOND_SERVER_PLAN_SUMMARY_H_
#define DMUOND_SERVER_PLAN_SUMMARY_H_

#include "absl/status/status.h"
#include "dmuond/v1/admin.pb.h"
#include "scheduler/plan.h"

namespace dmuond::server {

// Without the lanes' network_bytes.
[[nodiscard]] v1::GetPlanReply Summarize(const scheduler::Plan& plan);
// Adds them, which takes some microseconds for each matrix of a job of several nodes. An error: the
// plan is not that of these inputs.
[[nodiscard]] absl::Status AddNetwork(const scheduler::PlanInputs& inputs,
                                      const scheduler::Plan& plan, v1::GetPlanReply& reply);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_PLAN_SUMMARY_H_
