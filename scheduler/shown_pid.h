// How people are shown a process's pid. It is 0 where the process has none here, because it is in
// another PID namespace; a message must not show that number, nor advise to end process 0.
#ifndef DMUOND_SCHEDULER_SHOWN_PID_H_
#define DMUOND_SCHEDULER_SHOWN_PID_H_

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler {

inline constexpr char kPidNotVisible[] = "not visible";

// "4711", "not visible".
[[nodiscard]] inline std::string ShownPid(int64_t pid) {
  return pid > 0 ? absl::StrCat(pid) : kPidNotVisible;
}

// "pid 4711", with the number for programs; "pid not visible".
[[nodiscard]] inline Message SayPid(int64_t pid) {
  return pid > 0 ? Say("pid ", Named("pid", pid)) : Say("pid ", kPidNotVisible);
}

// "end that process (`kill 4711`)". `client` says where one runs that has no pid here.
[[nodiscard]] inline std::string HowToEnd(int64_t pid, const char* kill) {
  return pid > 0 ? absl::StrCat("end that process (`", kill, " ", pid, "`)")
                 : "end that process where it runs, in another PID namespace than this daemon";
}

// A field of a log's line.
template <typename Field>
[[nodiscard]] Field PidField(int64_t pid) {
  return pid > 0 ? Field("pid", pid) : Field("pid", kPidNotVisible);
}

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_SHOWN_PID_H_
