#include "server/daemon/snapshots/disk.h"

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace dmuond::server {

std::string Disk::Hang::Words() const {
  return absl::StrCat(what, " has not come to an end since ", since);
}

std::optional<std::string> Disk::Current() const {
  const std::optional<storage::Operation> at = storage_.Current();
  return at.has_value() ? std::optional(at->what) : std::nullopt;
}

DiskWatch::News Disk::OnTick(scheduler::TimePoint now) {
  const std::optional<storage::Operation> at = storage_.Current();
  const DiskWatch::News news =
      watch_.OnTick(now, at.has_value() ? std::optional(at->number) : std::nullopt);
  if (news == DiskWatch::News::kHangs) {
    const absl::Time since = absl::Now() - absl::FromChrono(watch_.waited());
    hang_ = {at->what, absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", since, absl::UTCTimeZone())};
  }
  return news;
}

}  // namespace dmuond::server
