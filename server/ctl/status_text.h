// A daemon's state for people: its group, lanes and job.
#ifndef DMUOND_SERVER_CTL_STATUS_TEXT_H_
#define DMUOND_SERVER_CTL_STATUS_TEXT_H_

#include <string>

#include "dmuond/v1/admin.pb.h"

namespace dmuond::server::ctl {

// Several lines, each with its end.
[[nodiscard]] std::string StatusText(const v1::GetStatusReply& status);

}  // namespace dmuond::server::ctl

#endif  // DMUOND_SERVER_CTL_STATUS_TEXT_H_
