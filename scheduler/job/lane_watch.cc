#include "scheduler/job/lane_watch.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace dmuond::scheduler {
namespace {

using std::chrono::milliseconds;

// Looks that are further apart: the daemon itself was kept from running, and what the lane has said
// meanwhile is not read yet.
constexpr milliseconds kLookMax{500};
constexpr milliseconds kIntervalMin{50};
constexpr milliseconds kIntervalMax{5'000};

std::string Seconds(std::chrono::steady_clock::duration duration) {
  return absl::StrCat(std::chrono::duration<double>(duration).count(), " s");
}

milliseconds IntervalOf(const LaneWatchOptions& options) {
  return std::clamp(std::min(options.lane_timeout, options.work_timeout) / 4, kIntervalMin,
                    kIntervalMax);
}

}  // namespace

LaneWatch::LaneWatch(LaneWatchOptions options)
    : options_(options), interval_(IntervalOf(options)) {}

void LaneWatch::OnAnswer(const Answer& answer) {
  OnReport();
  if (answer.number == number_) asked_ = false;
  idle_ = Duration(0);
  used_.reset();
  if (answer.progress != last_.progress) stuck_ = owed_ = Duration(0);
  if (!answer.device_busy) stuck_ = Duration(0);
  last_ = answer;
}

LaneWatch::Look LaneWatch::OnTick(TimePoint now, bool owes, const ProcessorTime& used) {
  Look look;
  const Duration elapsed = std::min<Duration>(now - std::exchange(ticked_, now).value_or(now),
                                              std::chrono::duration_cast<Duration>(kLookMax));
  if (options_.lane_timeout.count() > 0) Listen(elapsed, used, look);
  stuck_ = last_.device_busy ? stuck_ + elapsed : Duration(0);
  owed_ = owes ? owed_ + elapsed : Duration(0);
  if (!look.hangs.empty()) return look;
  if (stuck_ >= options_.work_timeout) {
    look.hangs = absl::StrCat("its device has been busy for ", Seconds(stuck_),
                              " without anything getting done");
    return look;
  }
  look.overdue = owed_ >= options_.work_timeout;
  // Somebody else is to blame; but if that helps nobody, a new lane does.
  const bool excused = answers() && (last_.awaits_rail || !last_.awaited_ranks.empty());
  if (owed_ >= (excused ? 2 : 1) * options_.work_timeout) {
    look.hangs = absl::StrCat("it has got nothing done for ", Seconds(owed_));
  }
  return look;
}

void LaneWatch::Listen(Duration elapsed, const ProcessorTime& used, Look& look) {
  if (!asked_) {
    idle_ += elapsed;
    if (idle_ < interval_) return;
    asked_ = true;
    look.ping = ++number_;
    OnReport();
    used_ = used();
    return;
  }
  silence_ += elapsed;
  quiet_ += elapsed;
  if (silence_ < interval_) return;
  const std::optional<milliseconds> now_used = used();
  // One that ends says so itself.
  if (!now_used.has_value() || !used_.has_value() || *now_used > *used_) quiet_ = Duration(0);
  used_ = now_used;
  if (quiet_ >= options_.lane_timeout) {
    look.hangs = absl::StrCat("it has not answered for ", Seconds(silence_),
                              " and not used the processor for ", Seconds(quiet_));
  } else if (silence_ >= options_.work_timeout) {
    look.hangs = absl::StrCat("it has computed for ", Seconds(silence_), " without an answer");
  }
}

}  // namespace dmuond::scheduler
