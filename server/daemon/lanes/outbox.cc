#include "server/daemon/lanes/outbox.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dmuond/wire/frame.h"

namespace dmuond::server {
namespace {

constexpr size_t kFramesAtOnce = 64;

// One sendmsg() that does not block; descriptors, if any, go with the first byte.
ssize_t SendSome(int socket, iovec* vectors, size_t count, const std::vector<wire::UniqueFd>& fds) {
  msghdr message{};
  message.msg_iov = vectors;
  message.msg_iovlen = count;
  std::string control;
  if (!fds.empty()) {
    const size_t bytes = fds.size() * sizeof(int);
    control.assign(CMSG_SPACE(bytes), '\0');
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(bytes);
    for (size_t i = 0; i < fds.size(); ++i) {
      const int fd = fds[i].get();
      std::memcpy(CMSG_DATA(header) + (i * sizeof(int)), &fd, sizeof(int));
    }
  }
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  return sent;
}

}  // namespace

absl::Status Outbox::Keep(const std::string& body, const std::vector<int>& fds) {
  if (body.size() > wire::kFrameBytesMax || fds.size() > wire::kFrameFdsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("frame of ", body.size(), " bytes and ", fds.size(), " descriptors; at most ",
                     wire::kFrameBytesMax, " and ", wire::kFrameFdsMax));
  }
  Waiting frame;
  const uint32_t header[2] = {static_cast<uint32_t>(body.size()),
                              static_cast<uint32_t>(fds.size())};
  frame.bytes.reserve(sizeof(header) + body.size());
  frame.bytes.append(reinterpret_cast<const char*>(header), sizeof(header));
  frame.bytes.append(body);
  if (waiting_bytes_ + frame.bytes.size() > kWaitingBytesMax) {
    return absl::ResourceExhaustedError(absl::StrCat(waiting_bytes_, " bytes wait to be read, ",
                                                     frame.bytes.size(), " more make more than ",
                                                     kWaitingBytesMax));
  }
  for (const int fd : fds) {
    frame.fds.emplace_back(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!frame.fds.back().valid()) {
      return absl::ErrnoToStatus(errno, absl::StrCat("duplicating descriptor ", fd));
    }
  }
  waiting_bytes_ += frame.bytes.size();
  frames_.push_back(std::move(frame));
  return absl::OkStatus();
}

absl::Status Outbox::Flush(int socket) {
  while (!frames_.empty()) {
    std::array<iovec, kFramesAtOnce> vectors;
    size_t count = 0;
    for (Waiting& frame : frames_) {
      if (count == vectors.size() || (count > 0 && !frame.fds.empty())) break;
      vectors[count++] = {frame.bytes.data() + frame.sent, frame.bytes.size() - frame.sent};
    }
    const ssize_t sent = SendSome(socket, vectors.data(), count, frames_.front().fds);
    if (sent < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) return absl::OkStatus();
      return absl::UnavailableError(absl::ErrnoToStatus(errno, "sendmsg").message());
    }
    frames_.front().fds.clear();
    for (auto left = static_cast<size_t>(sent); left > 0;) {
      Waiting& frame = frames_.front();
      const size_t of_frame = std::min(left, frame.bytes.size() - frame.sent);
      left -= of_frame;
      frame.sent += of_frame;
      if (frame.sent < frame.bytes.size()) break;
      waiting_bytes_ -= frame.bytes.size();
      frames_.pop_front();
    }
  }
  return absl::OkStatus();
}

}  // namespace dmuond::server
