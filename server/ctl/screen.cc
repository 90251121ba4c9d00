#include "server/ctl/screen.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <ctime>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"

namespace dmuond::server::ctl {
namespace {

constexpr char kAlternateScreen[] = "\x1b[?1049h\x1b[?25l";  // without a cursor
constexpr char kScreenBefore[] = "\x1b[?25h\x1b[?1049l";
constexpr std::array<int, 3> kSignals = {SIGINT, SIGTERM, SIGHUP};

volatile std::sig_atomic_t ended = 0;
void End(int /*signal*/) { ended = 1; }

bool WriteAll(absl::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(STDOUT_FILENO, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    text.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

// The lines that there is room for, each without what is left of an earlier one.
std::string Fitted(const std::string& text) {
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_row == 0) size = {24, 80, 0, 0};
  const std::vector<absl::string_view> lines = absl::StrSplit(text, '\n');
  std::string fitted = "\x1b[H";
  for (size_t i = 0; i < lines.size() && i < size.ws_row; ++i) {
    if (i > 0) fitted += "\r\n";
    absl::StrAppend(&fitted, lines[i].substr(0, size.ws_col), "\x1b[K");
  }
  return fitted + "\x1b[J";
}

}  // namespace

Screen::Screen() : terminal_(::isatty(STDOUT_FILENO) == 1) {
  // Held back but for the moments of waiting, so that none comes between a look and the wait.
  sigset_t held;
  sigemptyset(&held);
  struct sigaction action {};
  action.sa_handler = End;
  for (const int signal : kSignals) {
    sigaddset(&held, signal);
    ::sigaction(signal, &action, nullptr);
  }
  ::pthread_sigmask(SIG_BLOCK, &held, nullptr);
  if (!terminal_) return;
  termios now{};
  if (::tcgetattr(STDIN_FILENO, &now) == 0) {
    before_ = now;
    now.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
    ::tcsetattr(STDIN_FILENO, TCSADRAIN, &now);
  }
  WriteAll(kAlternateScreen);
}

Screen::~Screen() {
  if (terminal_) WriteAll(kScreenBefore);
  if (before_.has_value()) ::tcsetattr(STDIN_FILENO, TCSADRAIN, &*before_);
}

bool Screen::Show(const std::string& text) {
  if (terminal_) return WriteAll(Fitted(text));
  return WriteAll(std::exchange(shown_, true) ? absl::StrCat("\n", text) : text);
}

bool Screen::EndsWithin(absl::Duration time) {
  const absl::Time end = absl::Now() + time;
  sigset_t none;
  sigemptyset(&none);
  while (ended == 0) {
    const absl::Duration left = end - absl::Now();
    if (left <= absl::ZeroDuration()) return false;
    const timespec timeout = absl::ToTimespec(left);
    // What comes by a pipe is no key.
    pollfd keys{before_.has_value() ? STDIN_FILENO : -1, POLLIN, 0};
    if (::ppoll(&keys, 1, &timeout, &none) <= 0 || keys.revents == 0) continue;
    char key = 0;
    if (::read(STDIN_FILENO, &key, 1) != 1 || key == 'q' || key == 'Q') return true;
  }
  return true;
}

}  // namespace dmuond::server::ctl
