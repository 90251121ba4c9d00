#include "server/daemon/calls/awaited.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace dmuond::server {

using std::chrono::milliseconds;

void FillAwaited(Core& core, google::protobuf::RepeatedPtrField<v1::Awaited>& awaited) {
  const scheduler::NodeJob& job = core.held_job();
  awaited.Clear();
  if (!job.exists() || !job.failure().ok()) return;
  const auto now = std::chrono::steady_clock::now();
  // The coordinator cannot say it then, or is what is missing.
  if (job.broken_since().has_value()) {
    const auto waited = std::chrono::duration_cast<milliseconds>(now - *job.broken_since());
    if (waited < scheduler::kAwaitedQuiet) return;
    v1::Awaited& one = *awaited.Add();
    const GroupGaps gaps = core.peers == nullptr ? GroupGaps() : core.peers->Gaps();
    one.set_what(
        !gaps.missing.empty()
            ? absl::StrCat("the daemon of node ", absl::StrJoin(gaps.missing, ", "))
            : absl::StrCat("the group, which forms anew ",
                           gaps.not_joined.empty() ? "" : "without us: ", gaps.not_joined));
    one.set_since_ms(waited.count());
    const auto left = core.options.coordinator.step.session_linger - waited;
    one.set_patience_ms(std::max<int64_t>(1, left.count()));
    one.set_otherwise("the job ends with PEER_LOST");
    return;
  }
  const auto since_told = std::chrono::duration_cast<milliseconds>(now - job.waiting_told());
  awaited = job.waiting().awaited();
  for (v1::Awaited& one : awaited) {
    one.set_since_ms(one.since_ms() + since_told.count());
    if (one.patience_ms() == 0) continue;
    one.set_patience_ms(std::max<int64_t>(1, one.patience_ms() - since_told.count()));
  }
}

}  // namespace dmuond::server
