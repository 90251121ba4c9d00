#include "server/daemon/calls/awaited.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/common/errors.h"

namespace dmuond::server {

using std::chrono::milliseconds;

namespace {

std::string MissingInGroup(const Core& core) {
  const GroupGaps gaps = core.peers == nullptr ? GroupGaps() : core.peers->Gaps();
  if (!gaps.missing.empty()) {
    return absl::StrCat("the daemon of node ", absl::StrJoin(gaps.missing, ", "));
  }
  if (gaps.not_joined.empty()) return "the group, which is forming";
  return absl::StrCat("the group, which is forming without this node: ", gaps.not_joined);
}

}  // namespace

absl::Status GroupNotFormed(const Core& core) {
  return Error(absl::StatusCode::kUnavailable, "GROUP_NOT_FORMED",
               Say("the group of ", Named("nodes", core.options.nodes),
                   " daemons has not formed. Awaited is ", Named("awaited", MissingInGroup(core))));
}

std::string MissingRanks(
    Core& core, const std::function<bool(const scheduler::RankTable::Session*)>& has_come) {
  const scheduler::NodeJob& job = core.held_job();
  google::protobuf::RepeatedPtrField<v1::Awaited> told;
  FillAwaited(core, told);
  if (!told.empty()) {
    return absl::StrJoin(told, "; ", [](std::string* out, const v1::Awaited& one) {
      absl::StrAppend(out, one.what());
    });
  }
  constexpr size_t kNamedMax = 16;
  std::vector<int32_t> missing;
  size_t more = 0;
  for (int32_t rank = 0; rank < job.world_size(); ++rank) {
    const scheduler::RankTable::Session* session = job.ranks().OfRank(rank);
    const bool elsewhere = session == nullptr && job.plan() != nullptr &&
                           job.inputs()->layout.trainers[rank].node.value() != core.options.node;
    if (elsewhere || has_come(session)) continue;
    if (missing.size() < kNamedMax) {
      missing.push_back(rank);
    } else {
      ++more;
    }
  }
  constexpr char kElsewhere[] = "`dmuonctl status` on node 0 names those of other nodes";
  if (missing.empty()) return absl::StrCat("none of this node; ", kElsewhere);
  return absl::StrCat(
      missing.size() == 1 ? "rank " : "ranks ", absl::StrJoin(missing, ", "),
      more > 0 ? absl::StrCat(" and ", more, " more") : "",
      core.options.nodes > 1 ? absl::StrCat(", as far as this node knows; ", kElsewhere) : "");
}

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
    one.set_what(MissingInGroup(core));
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
