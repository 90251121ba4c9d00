#include "server/daemon/group/peer_stream.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>

namespace dmuond::server {

absl::Status PlainStream::Read(char* data, size_t size) {
  while (size > 0) {
    const ssize_t got = ::recv(socket_.get(), data, size, 0);
    if (got > 0) {
      data += got;
      size -= static_cast<size_t>(got);
      continue;
    }
    if (got == 0) return absl::UnavailableError("the connection has ended");
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return absl::ErrnoToStatus(errno, "recv");
    if (absl::Status waited = patience_.WaitFor(socket_.get(), POLLIN); !waited.ok()) return waited;
  }
  return absl::OkStatus();
}

absl::Status PlainStream::Write(absl::string_view data) {
  while (!data.empty()) {
    const ssize_t put = ::send(socket_.get(), data.data(), data.size(), MSG_NOSIGNAL);
    if (put >= 0) {
      data.remove_prefix(static_cast<size_t>(put));
      continue;
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return absl::ErrnoToStatus(errno, "send");
    if (absl::Status waited = patience_.WaitFor(socket_.get(), POLLOUT); !waited.ok()) {
      return waited;
    }
  }
  return absl::OkStatus();
}

}  // namespace dmuond::server
