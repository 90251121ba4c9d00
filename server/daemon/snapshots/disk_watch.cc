#include "server/daemon/snapshots/disk_watch.h"

#include <algorithm>
#include <utility>

namespace dmuond::server {
namespace {

// Ticks that are further apart: the daemon itself was kept from running, and its disk's thread too.
constexpr std::chrono::milliseconds kTickMax{500};

}  // namespace

DiskWatch::News DiskWatch::OnTick(scheduler::TimePoint now, std::optional<uint64_t> operation) {
  const auto elapsed = std::min<std::chrono::steady_clock::duration>(
      now - std::exchange(ticked_, now).value_or(now), kTickMax);
  if (!operation.has_value() || operation != operation_) {
    operation_ = operation;
    waited_ = {};
    return std::exchange(hangs_, false) ? News::kAnswers : News::kNone;
  }
  waited_ += elapsed;
  if (hangs_ || waited_ < timeout_) return News::kNone;
  hangs_ = true;
  return News::kHangs;
}

}  // namespace dmuond::server
