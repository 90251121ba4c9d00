// Calls that the daemon's services have answered: how often each method ended with each code, and
// how often something was refused, by reason. For metrics.
//
// Threads: any.
#ifndef DMUOND_SERVER_DAEMON_RPC_COUNTS_H_
#define DMUOND_SERVER_DAEMON_RPC_COUNTS_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/mutex.h"

namespace dmuond::server {

class RpcCounts {
 public:
  struct Counts {
    std::map<std::pair<std::string, absl::StatusCode>, int64_t> calls;  // by method and code
    std::map<std::string, int64_t> refusals;                            // by reason
  };

  // `method`: "/dmuond.v1.Trainer/SubmitStep". `status` is the call's answer, with its reason.
  void Add(absl::string_view method, const absl::Status& status);
  [[nodiscard]] Counts Read() const;

 private:
  mutable Mutex mutex_;
  Counts counts_ DMUOND_GUARDED_BY(mutex_);
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_RPC_COUNTS_H_
