// A lane that computes nothing, and says at once that all it is told to do is done: for fuzz
// targets, whose daemons get new lanes thousands of times. WILLING_LANE_UNITS says how many units
// it owns.
#include <unistd.h>

#include <cstdlib>
#include <limits>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "dmuond/v1/lane.pb.h"
#include "dmuond/wire/frame.h"

namespace dmuond {
namespace {

int Units() {
  const char* units = std::getenv("WILLING_LANE_UNITS");
  return units == nullptr ? 0 : std::atoi(units);
}

v1::LaneReport AnswerTo(const v1::LaneCommand& command) {
  v1::LaneReport report;
  if (command.has_configure()) report.mutable_ready()->set_device("willing");
  if (command.has_attach()) {
    report.mutable_attached()->set_rank(command.attach().rank());
    report.mutable_attached()->set_incarnation(command.attach().incarnation());
  }
  if (command.has_detach()) {
    report.mutable_detached()->set_rank(command.detach().rank());
    report.mutable_detached()->set_incarnation(command.detach().incarnation());
  }
  if (command.has_arm()) report.mutable_gathered()->set_attempt(command.arm().attempt());
  if (command.has_decision()) {
    report.mutable_published()->set_attempt(command.decision().attempt());
  }
  if (command.has_republish()) {
    report.mutable_published()->set_attempt(command.republish().attempt());
  }
  if (command.has_read_unit()) {
    report.mutable_unit_io()->set_request(command.read_unit().request());
  }
  if (command.has_write_unit()) {
    report.mutable_unit_io()->set_request(command.write_unit().request());
  }
  if (command.has_snapshot()) {
    v1::LaneReport::Copied& copied = *report.mutable_copied();
    copied.set_attempt(command.snapshot().attempt());
    copied.set_batches(std::numeric_limits<int32_t>::max());
    copied.set_complete(true);
    for (int unit = 0; unit < Units(); ++unit) copied.add_updates(1);
  }
  if (command.has_load_state()) report.mutable_state_loaded();
  if (command.has_ping()) report.mutable_pong()->set_number(command.ping().number());
  return report;
}

// Until the daemon says so, or is gone.
void Serve(int socket) {
  for (;;) {
    const absl::StatusOr<wire::Frame> frame = wire::ReceiveFrame(socket);
    v1::LaneCommand command;
    if (!frame.ok() || !command.ParseFromString(frame->body) || command.has_shutdown()) return;
    const v1::LaneReport report = AnswerTo(command);
    if (report.report_case() == v1::LaneReport::REPORT_NOT_SET) continue;
    if (!wire::SendFrame(socket, report.SerializeAsString()).ok()) return;
  }
}

}  // namespace
}  // namespace dmuond

int main(int argc, char** argv) {
  int socket = -1;
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    if (absl::ConsumePrefix(&argument, "--fd=") && !absl::SimpleAtoi(argument, &socket)) return 1;
  }
  dmuond::Serve(socket);
  ::_exit(0);  // as quickly as it came
}
