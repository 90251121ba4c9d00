// A plan in the words of the Admin service: what `dmuonctl plan` shows, online and offline.
#ifndef DMUOND_SERVER_PLAN_SUMMARY_H_
#define DMUOND_SERVER_PLAN_SUMMARY_H_

#include "dmuond/v1/admin.pb.h"
#include "scheduler/plan.h"

namespace dmuond::server {

[[nodiscard]] v1::GetPlanReply Summarize(const scheduler::Plan& plan);

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_PLAN_SUMMARY_H_
