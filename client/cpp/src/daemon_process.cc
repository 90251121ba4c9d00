#include "client/cpp/src/daemon_process.h"

#include "absl/strings/str_cat.h"

namespace dmuond::client {
namespace {

// A process that ends closes its sockets first.
constexpr std::chrono::milliseconds kEndsWithin{500};

}  // namespace

std::string DaemonProcess::Text() const {
  return process_.pid() > 0 ? absl::StrCat("the daemon (pid ", process_.pid(), ")") : "the daemon";
}

std::string DaemonProcess::HowItEnded() const {
  if (HasEnded(kEndsWithin)) return absl::StrCat(Text(), " has ended");
  return absl::StrCat(Text(), process_.EndIsSeen() ? ", which has not ended," : " has ended, or",
                      " has closed its connection to this trainer");
}

}  // namespace dmuond::client
