// What several tests of the daemon's parts need.
#ifndef DMUOND_TESTS_SERVER_DAEMON_SUPPORT_H_
#define DMUOND_TESTS_SERVER_DAEMON_SUPPORT_H_

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <utility>

#include "base/mutex.h"
#include "base/unique_fd.h"

namespace dmuond::server {

// Long enough for a loaded machine under a sanitizer; no test waits that long when all is well.
inline constexpr std::chrono::seconds kPatience{30};

// A fresh folder, 0700, removed with everything in it.
class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "dmuond-test-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// What callbacks bring from other threads.
template <typename T>
class Inbox {
 public:
  void Put(T value) {
    MutexLock lock(mutex_);
    values_.push_back(std::move(value));
    changed_.NotifyAll();
  }
  // Nothing: the patience is at its end.
  std::optional<T> Take(std::chrono::milliseconds patience = kPatience) {
    const auto deadline = std::chrono::steady_clock::now() + patience;
    MutexLock lock(mutex_);
    while (values_.empty()) {
      if (!changed_.WaitUntil(mutex_, deadline) && values_.empty()) return std::nullopt;
    }
    T value = std::move(values_.front());
    values_.pop_front();
    return value;
  }
  [[nodiscard]] size_t size() {
    MutexLock lock(mutex_);
    return values_.size();
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::deque<T> values_ DMUOND_GUARDED_BY(mutex_);
};

inline wire::UniqueFd ConnectUnix(const std::string& path, int type) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  wire::UniqueFd socket(::socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    return {};
  }
  return socket;
}

// True: the other end has closed the connection. Data that lies before the end is thrown away.
inline bool EndComes(int socket) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    pollfd polled{socket, POLLIN, 0};
    if (left.count() <= 0 || ::poll(&polled, 1, static_cast<int>(left.count())) <= 0) return false;
    char bytes[4096];
    const ssize_t size = ::recv(socket, bytes, sizeof(bytes), 0);
    if (size == 0 || (size < 0 && errno == ECONNRESET)) return true;
  }
}

inline size_t CountEntries(const std::string& folder) {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++count;
  return count;
}
inline size_t OpenDescriptors() { return CountEntries("/proc/self/fd"); }
inline size_t Threads() { return CountEntries("/proc/self/task"); }

inline void WriteFile(const std::string& path, const std::string& text) {
  std::ofstream(path) << text;
}

}  // namespace dmuond::server

#endif  // DMUOND_TESTS_SERVER_DAEMON_SUPPORT_H_
