#include "client/cpp/src/wait_notice.h"

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"

namespace dmuond::client {
namespace {

using Milliseconds = std::chrono::milliseconds;
using Seconds = std::chrono::seconds;

constexpr std::array kToldAfter = {Seconds(5), Seconds(30), Seconds(60), Seconds(120),
                                   Seconds(240)};
constexpr Seconds kToldEvery{300};  // after those
// Where it is time to say something, and the daemon has not said what.
constexpr Milliseconds kLookAgain{500};
constexpr int kNamedMax = 4;

std::string Text(std::chrono::nanoseconds time) {
  const int64_t seconds = std::chrono::duration_cast<Seconds>(time).count();
  if (seconds < 60) return absl::StrCat(seconds, " s");
  if (seconds < 3600) return absl::StrCat(seconds / 60, " min ", seconds % 60, " s");
  return absl::StrCat(seconds / 3600, " h ", seconds / 60 % 60, " min");
}

std::string Text(const v1::Awaited& awaited) {
  std::string text =
      absl::StrCat(awaited.what(), " (awaited for ", Text(Milliseconds(awaited.since_ms())));
  if (awaited.patience_ms() > 0) {
    absl::StrAppend(&text, "; in ", Text(Milliseconds(awaited.patience_ms())), " ",
                    awaited.otherwise());
  }
  return text + ")";
}

}  // namespace

Seconds WaitNotice::Due() const {
  if (told_ < kToldAfter.size()) return kToldAfter[told_];
  return kToldAfter.back() + static_cast<int64_t>(told_ - kToldAfter.size() + 1) * kToldEvery;
}

Milliseconds WaitNotice::Left(Clock::time_point now) const {
  const auto left = std::chrono::ceil<Milliseconds>(began_ + Due() - now);
  return std::max(left, kLookAgain);
}

std::string WaitNotice::Hear(const v1::WaitStepReply& reply, Clock::time_point now) {
  const Clock::duration waited = now - began_;
  if (waited < Due() || reply.awaited_size() == 0) return "";
  std::string text =
      absl::StrCat("rank ", rank_, ": step ", step_, " has waited ", Text(waited), " so far");
  for (int i = 0; i < std::min(reply.awaited_size(), kNamedMax); ++i) {
    absl::StrAppend(&text, i == 0 ? ", for " : "; for ", Text(reply.awaited(i)));
  }
  if (reply.awaited_size() > kNamedMax) {
    absl::StrAppend(&text, "; for ", reply.awaited_size() - kNamedMax, " more");
  }
  while (Due() <= waited) ++told_;
  return text;
}

std::string WaitNotice::End(Clock::time_point now) const {
  if (told_ == 0) return "";
  return absl::StrCat("rank ", rank_, ": step ", step_, " goes on after ", Text(now - began_));
}

}  // namespace dmuond::client
