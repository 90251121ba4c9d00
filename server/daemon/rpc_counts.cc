#include "server/daemon/rpc_counts.h"

#include "absl/strings/strip.h"
#include "server/common/errors.h"

namespace dmuond::server {

void RpcCounts::Add(absl::string_view method, const absl::Status& status) {
  absl::ConsumePrefix(&method, "/");
  MutexLock lock(mutex_);
  ++counts_.calls[{std::string(method), status.code()}];
  // Methods are those of our services, and reasons stand in the code: neither grows for ever.
  if (const std::string reason = ReasonOf(status); !reason.empty()) ++counts_.refusals[reason];
}

RpcCounts::Counts RpcCounts::Read() const {
  MutexLock lock(mutex_);
  return counts_;
}

}  // namespace dmuond::server
