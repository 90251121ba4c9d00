// Named points in the programs, at which a test's driver can stop a process for as long as it wants
// and do something to it. Without a driver, which is always outside tests, a point is one relaxed
// load.
//
//   fault::ConnectFaultDriver();             // once, in main(): looks at DMUOND_FAULT_SOCKET
//   fault::FaultPoint("lane.update.before_flip");
//   if (const int error = fault::FaultPoint("storage.write")) return absl::ErrnoToStatus(error, …);
//
// With DMUOND_FAULT_SOCKET (a SOCK_SEQPACKET Unix socket) and DMUOND_FAULT_POINTS (names, separated
// by commas; "*": all), the process says "PID POINT" on a connection of its own and waits for the
// answer:
//   "go"          it goes on; so it does when the driver closes the connection
//   "cut tcp"     it shuts down its TCP connections, then goes on; "cut unix": its Unix streams;
//                 "cut packets": its Unix packet sockets, a trainer's attach socket
//   "fail ERRNO"  the point returns that number, where the caller knows what to do with it
//
// Threads: any; one that waits holds up no other.
#ifndef DMUOND_BASE_FAULT_POINT_H_
#define DMUOND_BASE_FAULT_POINT_H_

#include <dirent.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace dmuond::fault {
namespace internal {

struct Driver {
  const char* socket;
  const char* points;
};

inline std::atomic<const Driver*> driver{nullptr};

// Whether `name` is one of the list's names.
inline bool Listed(const char* list, const char* name) {
  if (std::strcmp(list, "*") == 0) return true;
  const size_t length = std::strlen(name);
  for (const char* at = std::strstr(list, name); at != nullptr; at = std::strstr(at + 1, name)) {
    const bool begins = at == list || at[-1] == ',';
    if (begins && (at[length] == '\0' || at[length] == ',')) return true;
  }
  return false;
}

// As a broken network or a killed peer would: both ends see the end of the connection. Sockets that
// listen and `own`, the driver's connection, stay.
inline void Cut(bool tcp, int type, int own) {
  const std::unique_ptr<DIR, int (*)(DIR*)> open(::opendir("/proc/self/fd"), ::closedir);
  if (open == nullptr) return;
  while (const dirent* entry = ::readdir(open.get())) {
    const int fd = std::atoi(entry->d_name);
    const auto option = [fd](int name) {
      int value = -1;
      socklen_t size = sizeof(value);
      return ::getsockopt(fd, SOL_SOCKET, name, &value, &size) == 0 ? value : -1;
    };
    const int domain = option(SO_DOMAIN);
    const bool matches = tcp ? domain == AF_INET || domain == AF_INET6 : domain == AF_UNIX;
    if (matches && fd != own && option(SO_TYPE) == type && option(SO_ACCEPTCONN) == 0) {
      ::shutdown(fd, SHUT_RDWR);
    }
  }
}

inline int Report(const Driver& to, const char* name) {
  if (!Listed(to.points, name)) return 0;
  const int errno_before = errno;
  int error = 0;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, to.socket, sizeof(address.sun_path) - 1);
  const int fd = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  std::array<char, 128> text{};
  const int size = std::snprintf(text.data(), text.size(), "%d %s", ::getpid(), name);
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 &&
      ::send(fd, text.data(), size, MSG_NOSIGNAL) == size) {
    text.fill('\0');
    ssize_t received = -1;
    do {
      received = ::recv(fd, text.data(), text.size() - 1, 0);
    } while (received < 0 && errno == EINTR);
    if (std::strcmp(text.data(), "cut tcp") == 0) Cut(/*tcp=*/true, SOCK_STREAM, fd);
    if (std::strcmp(text.data(), "cut unix") == 0) Cut(/*tcp=*/false, SOCK_STREAM, fd);
    if (std::strcmp(text.data(), "cut packets") == 0) Cut(/*tcp=*/false, SOCK_SEQPACKET, fd);
    if (std::strncmp(text.data(), "fail ", 5) == 0) error = std::atoi(text.data() + 5);
  }
  ::close(fd);
  errno = errno_before;
  return error;
}

}  // namespace internal

// Returns whether there is a driver; the caller says so in its log.
inline bool ConnectFaultDriver() {
  static const internal::Driver driver{std::getenv("DMUOND_FAULT_SOCKET"),
                                       std::getenv("DMUOND_FAULT_POINTS")};
  if (driver.socket == nullptr || driver.points == nullptr) return false;
  internal::driver.store(&driver);
  return true;
}

// Returns 0, or the errno that the driver wants the caller to fail with.
inline int FaultPoint(const char* name) {
  const internal::Driver* const driver = internal::driver.load(std::memory_order_relaxed);
  return driver == nullptr ? 0 : internal::Report(*driver, name);
}

}  // namespace dmuond::fault

#endif  // DMUOND_BASE_FAULT_POINT_H_
