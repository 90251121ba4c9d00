#include "server/daemon/lanes/lane_bits.h"

#include <google/protobuf/text_format.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>

#include "absl/strings/str_cat.h"
#include "server/daemon/lanes/lane_spawn.h"

namespace dmuond::server {
namespace {

// A GPU's driver takes seconds where nothing else keeps it loaded.
constexpr std::chrono::seconds kAnswerWithin{60};

// What is written there until its other end closes; false: not in time.
bool ReadToEnd(int fd, std::chrono::steady_clock::time_point deadline, std::string& text) {
  std::array<char, 4096> bytes;
  for (;;) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd polled{fd, POLLIN, 0};
    if (left.count() <= 0 || ::poll(&polled, 1, static_cast<int>(left.count())) == 0) return false;
    const ssize_t size = ::read(fd, bytes.data(), bytes.size());
    if (size > 0) text.append(bytes.data(), static_cast<size_t>(size));
    if (size == 0) return true;
    if (size < 0 && errno != EINTR && errno != EAGAIN) return false;
  }
}

}  // namespace

absl::StatusOr<v1::LaneBits> AskForBits(const LaneBinary& binary, const NodeDevice& node_device,
                                        bool rails) {
  const std::string device = node_device.OfLane(scheduler::LaneIndex(0));
  const absl::StatusOr<SpawnedLane> lane =
      SpawnLane(binary, /*lane_index=*/0, device, node_device.OfLaneEnvironment(), /*lock=*/-1,
                {"--print_bits", rails ? "--rails" : "--norails"});
  if (!lane.ok()) return lane.status();
  std::string text;
  if (!ReadToEnd(lane->output.get(), std::chrono::steady_clock::now() + kAnswerWithin, text)) {
    ::kill(lane->pid, SIGKILL);
  }
  int status = 0;
  while (::waitpid(lane->pid, &status, 0) < 0 && errno == EINTR) {
  }
  v1::LaneBits bits;
  if (status != 0 || !google::protobuf::TextFormat::ParseFromString(text, &bits) ||
      bits.code().empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat(binary.path(), " --device=", device,
                     " --print_bits does not say what decides its bits. It has said: '", text,
                     "', and ended with status ", status));
  }
  return bits;
}

}  // namespace dmuond::server
