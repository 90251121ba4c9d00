// Starts a thread where the machine may not have one to give: the standard library throws then, and
// a process that does not catch it ends, with everything that it keeps.
//
//   absl::StatusOr<std::thread> thread = StartThread("a lane", [this] { Run(); });
//   if (!thread.ok()) return thread.status();
//
// Threads: any.
#ifndef DMUOND_WIRE_START_THREAD_H_
#define DMUOND_WIRE_START_THREAD_H_

#include <system_error>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace dmuond::wire {

// For messages: what ends a process or a call that gets no thread, and what to raise.
[[nodiscard]] inline absl::Status NoThread(absl::string_view what, const std::system_error& error) {
  return absl::ResourceExhaustedError(
      absl::StrCat("no thread can be started for ", what, ": ", error.code().message(),
                   ". The user's processes (ulimit -u), the cgroup's (pids.max) or the machine's "
                   "(kernel.threads-max) are at their limit, or memory is"));
}

// `what` the thread is for. RESOURCE_EXHAUSTED: none can be started now.
template <typename Run>
[[nodiscard]] absl::StatusOr<std::thread> StartThread(absl::string_view what, Run run) {
  try {
    return std::thread(std::move(run));
  } catch (const std::system_error& error) {
    return NoThread(what, error);
  }
}

}  // namespace dmuond::wire

#endif  // DMUOND_WIRE_START_THREAD_H_
