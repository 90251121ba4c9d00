// The node's part in checks of all copies: it gathers what its lanes tell, and keeps what came of
// the newest check.
#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "scheduler/convert/convert.h"
#include "server/common/log.h"
#include "server/daemon/core.h"

namespace dmuond::server {

void Core::BeginCheck(const v1::CheckExtracts& order) {
  extracts_.Clear();
  extracts_.set_number(order.number());
  extracts_.set_node(options.node);
  lanes_checked_.clear();
  if (!job.exists() || job.phase() != scheduler::NodeJob::Phase::kRunning) {
    extracts_.set_again(true);
    v1::MemberMessage answer;
    *answer.mutable_checked() = extracts_;
    return Tell(std::move(answer));
  }
  scheduler::node::CommandLanes command;
  for (int32_t i = 0; i < options.lanes; ++i) command.lanes.emplace_back(i);
  *command.command.mutable_check() = order;
  lanes.Command(command, memory);
}

void Core::OnLaneChecked(scheduler::LaneIndex lane, const v1::ExtractsChecked& checked) {
  if (checked.number() != extracts_.number() || !lanes_checked_.insert(lane).second) return;
  extracts_.mutable_digests()->MergeFrom(checked.digests());
  extracts_.set_held_us(std::max(extracts_.held_us(), checked.held_us()));
  extracts_.set_again(extracts_.again() || checked.again());
  if (!checked.error().empty()) {
    extracts_.set_error(absl::StrCat("lane ", job.lanes()[lane].id.value(), ": ", checked.error()));
  }
  if (lanes_checked_.size() < static_cast<size_t>(options.lanes)) return;
  v1::MemberMessage answer;
  answer.mutable_checked()->Swap(&extracts_);
  Tell(std::move(answer));
}

void Core::OnCheckDone(const v1::CheckDone& done) {
  for (const uint64_t request : done.requests()) {
    const auto wanted = checks_wanted.find(request);
    if (wanted != checks_wanted.end()) wanted->second = done;
  }
  mutex.Changed();
  if (!job.exists()) return;
  if (last_check.job != job.number()) last_check = {job.number(), {}};
  last_check.check.set_unix_ms(absl::ToUnixMillis(absl::Now()));
  *last_check.check.mutable_result() = done;
  last_check.check.mutable_result()->clear_requests();
  if (!done.error().empty()) {
    log::Warn("copies were not compared",
              {{"job", job.name()}, {"epoch", job.epoch()}, {"what", done.error()}});
    if (done.different() == 0) return;
  } else {
    last_check.check.set_compared_unix_ms(last_check.check.unix_ms());
  }
  last_check.check.set_different(done.different());
  log::Write(done.different() == 0 ? log::Level::kInfo : log::Level::kError,
             done.different() == 0 ? "all copies are equal" : "copies differ",
             {{"job", job.name()},
              {"epoch", job.epoch()},
              {"different", done.different()},
              {"digests", done.digests()},
              {"ranks", done.ranks()},
              {"took_ms", done.took_ms()},
              {"held_us", done.held_us()}});
  constexpr int kLines = 10;  // dmuonctl check and status have more
  for (int i = 0; i < std::min(kLines, done.differences_size()); ++i) {
    const v1::CheckDone::Difference& difference = done.differences(i);
    const absl::StatusOr<scheduler::Box> box = FromProto(difference.box());
    log::Error("a copy differs",
               {{"job", job.name()},
                {"parameter", difference.parameter()},
                {"box", box.ok() ? ToString(*box) : ""},
                {"kind", difference.kind()},
                {"node", difference.node()},
                {"ranks", absl::StrJoin(difference.ranks(), ",")},
                {"lane", difference.lane()},
                {"digest", absl::StrFormat("%016x", difference.digest())},
                {"expected", absl::StrFormat("%016x", difference.expected_digest())},
                {"against", difference.against()}});
  }
}

}  // namespace dmuond::server
