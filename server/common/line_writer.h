// Lines for a descriptor, written by a thread of its own: whoever has a line never waits for the
// one who reads, be it a full pipe that nobody empties or a terminal that was stopped with Ctrl-S.
// While the reader does not take them so many wait as there is room for; then the oldest are
// dropped, and the next line that gets through is preceded by one that says how many.
//
// Never destroyed: other threads may have lines while the process ends. Threads: any.
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

namespace dmuond::server {

class LineWriter {
 public:
  // The line, with its end, that says that `lines` were dropped.
  using Lost = std::function<std::string(int64_t lines)>;

  // Starts the thread, which goes on to the end of the process: REQUIRES that the object does, too.
  // The descriptor is the caller's.
  LineWriter(int fd, size_t waiting_bytes_max, Lost lost);
  LineWriter(const LineWriter&) = delete;
  LineWriter& operator=(const LineWriter&) = delete;

  // Never waits. `line` with its end.
  void Write(std::string line);

  // Waits until everything up to now is written or dropped; false: it is not, after `within`. May
  // be called in a handler of a signal, the one that ends the process say.
  bool Flush(std::chrono::milliseconds within) const;

 private:
  void Run();
  void WriteWhole(const std::string& line) const;

  const int fd_;
  const size_t waiting_bytes_max_;
  const Lost lost_;

  std::mutex mutex_;
  std::condition_variable came_;
  std::deque<std::string> waiting_;  // guarded by mutex_, and the two below
  size_t waiting_bytes_ = 0;
  int64_t dropped_ = 0;  // since the last line that got through
  // All lines ever: those that came, and those of them that are written or dropped.
  std::atomic<uint64_t> taken_{0};
  std::atomic<uint64_t> done_{0};
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_COMMON_LINE_WRITER_H_
