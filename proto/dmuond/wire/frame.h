// Frames over Unix sockets with descriptors in ancillary data.
//   stream  (lane socket pair): 8 bytes of header (uint32 body length, uint32 descriptor count),
//   the body packet  (attach socket, SOCK_SEQPACKET): one body a datagram
// The body is a serialised protobuf message. Sizes are checked before anything is allocated.
#ifndef DMUOND_WIRE_FRAME_H_
#define DMUOND_WIRE_FRAME_H_

#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"

namespace dmuond::wire {

inline constexpr size_t kFrameBytesMax = size_t{1} << 30;
inline constexpr size_t kPacketBytesMax = size_t{64} << 10;
inline constexpr size_t kFramePartBytes = size_t{1} << 20;  // allocated ahead of what has come
inline constexpr size_t kFrameFdsMax = 253;                 // SCM_MAX_FD

struct Frame {
  std::string body;
  std::vector<UniqueFd> fds;
};

namespace internal {

inline absl::Status Errno(const char* what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno)));
}

// Sends the whole buffer; descriptors go with its first byte.
inline absl::Status SendAll(int socket, const void* data, size_t size,
                            const std::vector<int>& fds) {
  const auto* bytes = static_cast<const char*>(data);
  std::string control;
  bool first = true;
  while (size > 0) {
    iovec vector{const_cast<char*>(bytes), size};
    msghdr message{};
    message.msg_iov = &vector;
    message.msg_iovlen = 1;
    if (first && !fds.empty()) {
      control.assign(CMSG_SPACE(fds.size() * sizeof(int)), '\0');
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
      std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
    }
    const ssize_t sent = ::sendmsg(socket, &message, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      return Errno("sendmsg");
    }
    first = false;
    bytes += sent;
    size -= static_cast<size_t>(sent);
  }
  return absl::OkStatus();
}

// One recvmsg; appends received descriptors. 0 bytes: the other end closed.
inline absl::StatusOr<size_t> ReceiveSome(int socket, void* data, size_t size,
                                          std::vector<UniqueFd>& fds) {
  alignas(cmsghdr) char control[CMSG_SPACE(kFrameFdsMax * sizeof(int))];
  iovec vector{data, size};
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t received = 0;
  do {
    received = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (received < 0 && errno == EINTR);
  if (received < 0) return Errno("recvmsg");
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + (i * sizeof(int)), sizeof(int));
      fds.emplace_back(fd);
    }
  }
  if ((message.msg_flags & (MSG_CTRUNC | MSG_TRUNC)) != 0) {
    return absl::InvalidArgumentError("a frame was cut: too long, or too many descriptors");
  }
  return static_cast<size_t>(received);
}

inline absl::Status ReceiveAll(int socket, char* data, size_t size, std::vector<UniqueFd>& fds) {
  while (size > 0) {
    absl::StatusOr<size_t> received = ReceiveSome(socket, data, size, fds);
    if (!received.ok()) return received.status();
    if (*received == 0) return absl::UnavailableError("the other end closed the socket");
    data += *received;
    size -= *received;
  }
  return absl::OkStatus();
}

}  // namespace internal

// Stream frames. Blocking; UNAVAILABLE when the other end is gone. One writer and one reader at a
// time.
inline absl::Status SendFrame(int socket, const std::string& body,
                              const std::vector<int>& fds = {}) {
  if (body.size() > kFrameBytesMax || fds.size() > kFrameFdsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("frame of ", body.size(), " bytes and ", fds.size(), " descriptors"));
  }
  std::string bytes(8, '\0');
  const uint32_t header[2] = {static_cast<uint32_t>(body.size()),
                              static_cast<uint32_t>(fds.size())};
  std::memcpy(bytes.data(), header, sizeof(header));
  bytes += body;
  return internal::SendAll(socket, bytes.data(), bytes.size(), fds);
}

inline absl::StatusOr<Frame> ReceiveFrame(int socket) {
  Frame frame;
  uint32_t header[2];
  absl::Status status =
      internal::ReceiveAll(socket, reinterpret_cast<char*>(header), sizeof(header), frame.fds);
  if (!status.ok()) return status;
  if (header[0] > kFrameBytesMax || header[1] > kFrameFdsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("frame of ", header[0], " bytes and ", header[1], " descriptors"));
  }
  // Memory for what has come, not for what was announced.
  for (size_t left = header[0]; left > 0;) {
    const size_t part = left < kFramePartBytes ? left : kFramePartBytes;
    const size_t before = frame.body.size();
    frame.body.resize(before + part);
    status = internal::ReceiveAll(socket, frame.body.data() + before, part, frame.fds);
    if (!status.ok()) return status;
    left -= part;
  }
  if (frame.fds.size() != header[1]) {
    return absl::InvalidArgumentError(absl::StrCat("a frame announced ", header[1],
                                                   " descriptors and carried ", frame.fds.size()));
  }
  return frame;
}

// Packet frames, for SOCK_SEQPACKET.
inline absl::Status SendPacket(int socket, const std::string& body,
                               const std::vector<int>& fds = {}) {
  if (body.empty() || body.size() > kPacketBytesMax || fds.size() > kFrameFdsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("packet of ", body.size(), " bytes and ", fds.size(), " descriptors"));
  }
  return internal::SendAll(socket, body.data(), body.size(), fds);
}

inline absl::StatusOr<Frame> ReceivePacket(int socket) {
  Frame frame;
  frame.body.resize(kPacketBytesMax);
  absl::StatusOr<size_t> size =
      internal::ReceiveSome(socket, frame.body.data(), frame.body.size(), frame.fds);
  if (!size.ok()) return size.status();
  if (*size == 0) return absl::UnavailableError("the other end closed the socket");
  frame.body.resize(*size);
  return frame;
}

}  // namespace dmuond::wire

#endif  // DMUOND_WIRE_FRAME_H_
