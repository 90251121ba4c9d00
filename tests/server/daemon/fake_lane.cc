// Stands in for dmuond-lane in tests. FAKE_LANE says how it behaves:
//   (unset)   answers AttachTrainer with Attached, its error text read from the first descriptor;
//             Release with Released; ends with 0 on Shutdown
//   wait      before that reads a byte from the first command's descriptor
//   die       writes 30 lines, then ends with 1
//   kill      ends by SIGKILL
//   stubborn  answers Ready, then ignores SIGTERM, reads nothing
//   hang      answers Ready, then reads nothing
//   garbage   writes bytes that are no frame, reads nothing
//   close     closes its socket and stays
//   inspect   answers Ready: its open descriptors, then environment OPENBLAS_CORETYPE and FAKE_WORD
#include <dirent.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "dmuond/v1/lane.pb.h"
#include "dmuond/wire/frame.h"

namespace dmuond {
namespace {

void Report(int socket, const v1::LaneReport& report) {
  if (!wire::SendFrame(socket, report.SerializeAsString()).ok()) std::exit(9);
}

void SayReady(int socket, const std::string& device) {
  v1::LaneReport report;
  report.mutable_ready()->set_device(device);
  Report(socket, report);
}

[[noreturn]] void Forever() {
  for (;;) ::pause();
}

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string OpenDescriptors() {
  std::vector<std::string> names;
  DIR* folder = ::opendir("/proc/self/fd");
  while (const dirent* entry = ::readdir(folder)) {
    int fd = -1;
    if (absl::SimpleAtoi(entry->d_name, &fd) && fd != ::dirfd(folder)) {
      names.emplace_back(entry->d_name);
    }
  }
  ::closedir(folder);
  std::sort(names.begin(), names.end());
  std::string text;
  for (const std::string& name : names) absl::StrAppend(&text, name, " ");
  return text;
}

std::string ReadText(int fd) {
  char text[64] = {};
  const ssize_t size = ::pread(fd, text, sizeof(text), 0);
  return {text, static_cast<size_t>(std::max<ssize_t>(size, 0))};
}

int Serve(int socket, bool wait) {
  for (;;) {
    absl::StatusOr<wire::Frame> frame = wire::ReceiveFrame(socket);
    v1::LaneCommand command;
    if (!frame.ok() || !command.ParseFromString(frame->body)) return 8;
    if (wait) {
      char byte = 0;
      if (::read(frame->fds.at(0).get(), &byte, 1) != 1) return 7;
      wait = false;
      continue;
    }
    if (command.has_shutdown()) return 0;
    v1::LaneReport report;
    if (command.has_release()) {
      report.mutable_released();
      Report(socket, report);
      continue;
    }
    report.mutable_attached()->set_rank(command.attach().rank());
    if (!frame->fds.empty()) report.mutable_attached()->set_error(ReadText(frame->fds[0].get()));
    Report(socket, report);
  }
}

int Run(int socket, const std::string& device) {
  const std::string mode = Environment("FAKE_LANE");
  if (mode == "die") {
    for (int i = 1; i <= 30; ++i) std::fprintf(stderr, "line %d\n", i);
    std::fprintf(stderr, "the end");
    return 1;
  }
  if (mode == "kill") ::raise(SIGKILL);
  if (mode == "stubborn") ::signal(SIGTERM, SIG_IGN);
  if (mode == "stubborn" || mode == "hang") {
    SayReady(socket, device);
    Forever();
  }
  if (mode == "garbage") {
    const std::string bytes(64, '\xff');
    if (::write(socket, bytes.data(), bytes.size()) < 0) return 6;
    Forever();
  }
  if (mode == "close") {
    ::close(socket);
    Forever();
  }
  if (mode == "inspect") {
    const std::string descriptors = OpenDescriptors();
    SayReady(socket, absl::StrCat(device, "|", descriptors, "|", Environment("OPENBLAS_CORETYPE"),
                                  "|", Environment("FAKE_WORD")));
  }
  return Serve(socket, mode == "wait");
}

}  // namespace
}  // namespace dmuond

int main(int argc, char** argv) {
  int socket = -1;
  std::string device;
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    if (absl::ConsumePrefix(&argument, "--fd=") && !absl::SimpleAtoi(argument, &socket)) return 5;
    if (absl::ConsumePrefix(&argument, "--device=")) device = std::string(argument);
  }
  return dmuond::Run(socket, device);
}
