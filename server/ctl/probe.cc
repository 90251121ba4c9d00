#include "server/ctl/probe.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>

#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "server/ctl/child.h"

namespace dmuond::server::ctl {
namespace {

// One line of the program.
void Take(const std::string& line, Probe& probe) {
  const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) {
    probe.words += line + "\n";
    return;
  }
  if (json.contains("at")) probe.at = json.value("at", "");
  if (json.contains("cuda")) probe.cuda = json.value("cuda", true);
  if (json.contains("nccl")) probe.nccl = json["nccl"];
  if (json.contains("driver")) probe.driver = json["driver"];
  if (json.contains("device")) probe.devices.push_back(json["device"]);
  if (json.contains("done")) probe.done = true;
}

// Until it is done, has ended or `deadline` has passed.
void ReadAll(int output, absl::Time deadline, Probe& probe) {
  std::array<char, 4096> bytes{};
  std::string text;
  while (!probe.done) {
    const int64_t left_ms = absl::ToInt64Milliseconds(deadline - absl::Now());
    pollfd polled{output, POLLIN, 0};
    const int ready = left_ms <= 0 ? 0 : ::poll(&polled, 1, static_cast<int>(left_ms));
    if (ready < 0 && errno == EINTR) continue;
    if (ready == 0) probe.hangs = true;
    const ssize_t size = ready <= 0 ? 0 : ::read(output, bytes.data(), bytes.size());
    if (size <= 0) return;
    text.append(bytes.data(), static_cast<size_t>(size));
    for (size_t end = 0; (end = text.find('\n')) != std::string::npos; text.erase(0, end + 1)) {
      Take(text.substr(0, end), probe);
    }
  }
}

// Waits for a child that ends, and kills one that hangs with what it has started. One that is stuck
// in the kernel does not end: it is left.
void End(Child& child, bool hangs) {
  constexpr int kPatienceMs = 1000;
  pollfd polled{child.pidfd(), POLLIN, 0};
  if (!hangs) ::poll(&polled, 1, kPatienceMs);
  ::kill(-child.pid(), SIGKILL);  // its group; it has not been waited for
  ::poll(&polled, 1, kPatienceMs);
  static_cast<void>(child.Ended());
}

}  // namespace

absl::StatusOr<Probe> RunProbe(const std::string& lane_binary,
                               const std::vector<std::string>& environment,
                               absl::Duration timeout) {
  std::array<int, 2> ends{-1, -1};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return absl::ErrnoToStatus(errno, "pipe2");
  const wire::UniqueFd ours(ends[0]);
  wire::UniqueFd theirs(ends[1]);
  ASSIGN_OR_RETURN(Child child, Child::Start({.arguments = {lane_binary, "--probe"},
                                              .environment = environment,
                                              .inherits = false,
                                              .own_group = true,
                                              .output = theirs.get(),
                                              .input = false}));
  theirs.Reset();
  Probe probe;
  ReadAll(ours.get(), absl::Now() + timeout, probe);
  End(child, probe.hangs);
  return probe;
}

}  // namespace dmuond::server::ctl
