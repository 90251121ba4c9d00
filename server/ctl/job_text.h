// A job for people.
#ifndef DMUOND_SERVER_CTL_JOB_TEXT_H_
#define DMUOND_SERVER_CTL_JOB_TEXT_H_

#include <string>

#include "dmuond/v1/admin.pb.h"

namespace dmuond::server::ctl {

// Several lines: state, counters, the last step's times, the trainers.
[[nodiscard]] std::string JobText(const v1::JobStatus& job);
// The result of a check of all copies: a line, and a table of the copies that differ.
[[nodiscard]] std::string CheckText(const v1::CheckDone& check);
// "committed, durable": "7, 5" or "7, none".
[[nodiscard]] std::string DurableStep(const v1::JobStatus& job);
// "epoch.counter", or "none".
[[nodiscard]] std::string OpenAttempt(const v1::JobStatus& job);

}  // namespace dmuond::server::ctl

#endif  // DMUOND_SERVER_CTL_JOB_TEXT_H_
