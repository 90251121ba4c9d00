// Signals that would end a process by default, that it never asks for, and that somebody may send
// all the same: to every process of a job or a container, or by a slip.
#ifndef DMUOND_SERVER_COMMON_STRAY_SIGNALS_H_
#define DMUOND_SERVER_COMMON_STRAY_SIGNALS_H_

#include <array>
#include <csignal>

namespace dmuond::server {

// Not among them: SIGTERM, SIGINT and SIGHUP, which have a meaning; SIGQUIT and SIGABRT, which give
// a core of a process that hangs; SIGXCPU, which a limit of processor time sends; and faults.
inline constexpr std::array<int, 8> kStraySignals = {SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM,
                                                     SIGPROF, SIGPOLL, SIGPWR,  SIGSTKFLT};

// Threads: the main one, at the start. A library that uses one of them may set a handler later.
inline void IgnoreStraySignals() {
  // What has a handler already, of a profiler that was preloaded, say, keeps it.
  const auto ignore = [](int stray) {
    struct sigaction now {};
    const bool unused = ::sigaction(stray, nullptr, &now) == 0 && now.sa_handler == SIG_DFL;
    if (unused) std::signal(stray, SIG_IGN);
  };
  for (const int stray : kStraySignals) ignore(stray);
  for (int stray = SIGRTMIN; stray <= SIGRTMAX; ++stray) ignore(stray);
}

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_COMMON_STRAY_SIGNALS_H_
