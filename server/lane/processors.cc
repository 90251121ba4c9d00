#include "server/lane/processors.h"

#include <sched.h>

#include <cerrno>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace dmuond::server::lane {

absl::Status StayNear(absl::string_view list) {
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
    return absl::ErrnoToStatus(errno, "sched_getaffinity");
  }
  cpu_set_t near;
  CPU_ZERO(&near);
  for (const absl::string_view range : absl::StrSplit(list, ',')) {
    const std::vector<absl::string_view> ends = absl::StrSplit(range, '-');
    int first = -1;
    int last = -1;
    if (ends.size() > 2 || !absl::SimpleAtoi(ends.front(), &first) ||
        !absl::SimpleAtoi(ends.back(), &last) || first < 0 || last < first) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", list, "' is no list of processors, as 0-3,8"));
    }
    for (int cpu = first; cpu <= last && cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &allowed)) CPU_SET(cpu, &near);
    }
  }
  if (CPU_COUNT(&near) == 0) return absl::OkStatus();
  if (::sched_setaffinity(0, sizeof(near), &near) != 0) {
    return absl::ErrnoToStatus(errno, "sched_setaffinity");
  }
  return absl::OkStatus();
}

}  // namespace dmuond::server::lane
