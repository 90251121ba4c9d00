// Writes lines to a descriptor in a thread of its own, so that no caller ever waits for the reader:
// a pipe that nobody empties, say, or a terminal that was stopped with Ctrl-S. While the reader
// takes nothing, lines wait up to a limit of bytes. Beyond it the oldest are dropped, and a line
// that says how many goes before the next one that gets through. A line that cannot be written (the
// disk is full, say) counts as dropped, too.
//
// Objects are never destroyed: other threads may write lines while the process ends. Threads: any.
#ifndef DMUOND_SERVER_COMMON_LINE_WRITER_H_
#define DMUOND_SERVER_COMMON_LINE_WRITER_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>

#include "base/unique_fd.h"

namespace dmuond::server {

class LineWriter {
 public:
  // Returns the line, with its end, that says that so many were dropped.
  using Lost = std::function<std::string(int64_t lines)>;

  // Starts the thread, which runs until the process ends. REQUIRES: the object lives as long. The
  // caller owns the descriptor.
  LineWriter(int fd, size_t waiting_bytes_max, Lost lost);
  LineWriter(const LineWriter&) = delete;
  LineWriter& operator=(const LineWriter&) = delete;

  // Never waits. `line` with its end.
  void Write(std::string line);
  // Lines that have not begun to be written go to `fd`.
  void Redirect(wire::UniqueFd fd);

  // Waits until everything up to now is written or dropped; false if it is not after `within`. May
  // be called in a signal handler.
  bool Flush(std::chrono::milliseconds within) const;

 private:
  void Run();
  // False: it cannot be written.
  bool WriteWhole(const std::string& line) const;

  int fd_;                // Run()'s
  wire::UniqueFd owned_;  // Run()'s: fd_, where it was redirected
  const size_t waiting_bytes_max_;
  const Lost lost_;

  std::mutex mutex_;
  std::condition_variable came_;
  wire::UniqueFd redirected_;  // guarded by mutex_, and the three below
  std::deque<std::string> waiting_;
  size_t waiting_bytes_ = 0;
  int64_t dropped_ = 0;  // since the last line that got through
  // All lines ever: those that came, and those of them that are written or dropped.
  std::atomic<uint64_t> taken_{0};
  std::atomic<uint64_t> done_{0};
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_COMMON_LINE_WRITER_H_
