// A terminal's whole screen, for a text that is shown again and again until somebody ends it.
//
//   Screen screen;
//   do screen.Show(text); while (!screen.EndsWithin(absl::Seconds(1)));
//
// Where stdout is no terminal, each text is written below the last one, with an empty line between.
// What the screen and the terminal's settings were comes back with the destructor. One at a time in
// a process: it handles SIGINT, SIGTERM and SIGHUP.
#ifndef DMUOND_SERVER_CTL_SCREEN_H_
#define DMUOND_SERVER_CTL_SCREEN_H_

#include <termios.h>

#include <optional>
#include <string>

#include "absl/time/time.h"

namespace dmuond::server::ctl {

class Screen {
 public:
  Screen();
  ~Screen();
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  // As much of the text as there is room for. False: nobody can read it any more.
  [[nodiscard]] bool Show(const std::string& text);
  // Waits; true as soon as there was a q, a ^C or one of the signals.
  [[nodiscard]] bool EndsWithin(absl::Duration time);

 private:
  const bool terminal_;
  bool shown_ = false;
  std::optional<termios> before_;  // stdin's, where it is a terminal
};

}  // namespace dmuond::server::ctl

#endif  // DMUOND_SERVER_CTL_SCREEN_H_
