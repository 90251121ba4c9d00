// The members' connections: every two of them have one, over abstract sockets.
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>

#include "tests/fake_cuda/nccl/fake_nccl.h"

namespace dmuond::fake_nccl {
namespace {

constexpr int kPollMs = 10;  // after which it is seen that a mesh has been stopped

struct Greeting {
  int rank = 0;
  int size = 0;
  int version = 0;
  CUuuid device{};
};

// Goes before the bytes of every message.
struct Header {
  Message::Kind kind = Message::Kind::kSend;  // the sender's
  uint32_t padding = 0;
  uint64_t group = 0;  // of the two
  uint64_t bytes = 0;
};

sockaddr_un AddressOf(const std::string& name, socklen_t* size) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  *size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

bool Sends(Message::Kind kind) {
  return kind == Message::Kind::kSend || kind == Message::Kind::kReduceOut ||
         kind == Message::Kind::kBroadcastOut;
}
// What the peer does where this member receives.
Message::Kind SenderOf(Message::Kind kind) {
  switch (kind) {
    case Message::Kind::kReceive:
      return Message::Kind::kSend;
    case Message::Kind::kReduceIn:
      return Message::Kind::kReduceOut;
    default:
      return Message::Kind::kBroadcastOut;
  }
}

// Bytes on their way to or from one peer.
struct Piece {
  std::byte* data = nullptr;
  size_t left = 0;
};
struct Traffic {
  std::deque<Header> headers;  // that are sent: at fixed places
  std::deque<Piece> out;
  std::deque<Message> in;
  // Of the first message of `in`.
  Header header;
  size_t header_has = 0;
  size_t has = 0;
};

}  // namespace

void Abort(const char* format, ...) {
  std::fputs("fake NCCL: ", stderr);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputs("\n", stderr);
  std::abort();
}

Mesh::Mesh(std::string id, int rank, int size, int version, const CUuuid& device)
    : id_(std::move(id)),
      rank_(rank),
      size_(size),
      version_(version),
      device_(device),
      listener_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)),
      peers_(size) {
  const char* const mismatch = std::getenv("FAKE_NCCL_MISMATCH");
  mismatch_hangs_ = mismatch != nullptr && std::strcmp(mismatch, "hang") == 0;
  socklen_t length = 0;
  const sockaddr_un address = AddressOf(NameOf(rank), &length);
  if (::bind(listener_, reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      ::listen(listener_, size) != 0) {
    Abort("member %d cannot listen: %s", rank, std::strerror(errno));
  }
}

Mesh::~Mesh() {
  ::close(listener_);
  for (const Peer& peer : peers_) {
    if (peer.socket >= 0) ::close(peer.socket);
  }
}

std::string Mesh::NameOf(int rank) const { return id_ + "-" + std::to_string(rank); }

bool Mesh::Connect(int peer) {
  socklen_t length = 0;
  const sockaddr_un address = AddressOf(NameOf(peer), &length);
  peers_[peer].socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  while (!stopped_) {
    if (::connect(peers_[peer].socket, reinterpret_cast<const sockaddr*>(&address), length) == 0) {
      return true;
    }
    ::usleep(kPollMs * 1000 / 2);
  }
  return false;
}

bool Mesh::ReadAll(int socket, void* data, size_t bytes) const {
  auto* at = static_cast<std::byte*>(data);
  while (bytes > 0 && !stopped_) {
    pollfd polled{socket, POLLIN, 0};
    if (::poll(&polled, 1, kPollMs) <= 0) continue;
    const ssize_t n = ::recv(socket, at, bytes, 0);
    if (n > 0) {
      at += n;
      bytes -= static_cast<size_t>(n);
    } else {
      ::usleep(kPollMs * 1000);  // it has died, and who waits for it waits
    }
  }
  return bytes == 0;
}

// Returns why the peer behind the socket cannot be one; `expected` -1: any of the higher ranks.
std::string Mesh::Greet(int socket, int expected) {
  const Greeting own{rank_, size_, version_, device_};
  (void)::send(socket, &own, sizeof(own), MSG_NOSIGNAL);
  Greeting other;
  if (!ReadAll(socket, &other, sizeof(other))) return "";
  if (expected < 0) peers_[other.rank].socket = socket;
  if (other.size != size_) return "other numbers of members";
  if (other.version != version_) return "Mismatched NCCL version detected";
  if (std::memcmp(&other.device, &device_, sizeof(device_)) == 0) {
    return "Duplicate GPU detected : rank " + std::to_string(rank_) + " and rank " +
           std::to_string(other.rank);
  }
  return "";
}

std::string Mesh::Meet() {
  for (int peer = 0; peer < rank_; ++peer) {
    if (!Connect(peer)) return "";
    if (std::string wrong = Greet(peers_[peer].socket, peer); !wrong.empty()) return wrong;
  }
  for (int missing = size_ - 1 - rank_; missing > 0 && !stopped_;) {
    pollfd polled{listener_, POLLIN, 0};
    if (::poll(&polled, 1, kPollMs) <= 0) continue;
    const int socket = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket < 0) continue;
    if (std::string wrong = Greet(socket, -1); !wrong.empty()) return wrong;
    --missing;
  }
  return "";
}

void Mesh::Exchange(const std::vector<Message>& messages) {
  std::vector<Traffic> all(size_);
  for (const Message& message : messages) {
    Traffic& traffic = all[message.peer];
    if (traffic.out.empty() && traffic.in.empty()) ++peers_[message.peer].groups;
    if (!Sends(message.kind)) {
      traffic.in.push_back(message);
      continue;
    }
    traffic.headers.push_back({message.kind, 0, peers_[message.peer].groups, message.bytes});
    traffic.out.push_back({reinterpret_cast<std::byte*>(&traffic.headers.back()), sizeof(Header)});
    if (message.bytes > 0) traffic.out.push_back({message.data, message.bytes});
  }
  const auto write = [&](Peer& peer, Traffic& traffic) {
    Piece& piece = traffic.out.front();
    const ssize_t n = ::send(peer.socket, piece.data, piece.left, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0) {
      peer.silent = errno != EAGAIN;
      return;
    }
    piece.data += n;
    piece.left -= static_cast<size_t>(n);
    if (piece.left == 0) traffic.out.pop_front();
  };
  const auto read = [&](int rank, Peer& peer, Traffic& traffic) {
    const Message& message = traffic.in.front();
    const bool header = traffic.header_has < sizeof(Header);
    std::byte* const to = header
                              ? reinterpret_cast<std::byte*>(&traffic.header) + traffic.header_has
                              : message.data + traffic.has;
    const size_t wanted =
        header ? sizeof(Header) - traffic.header_has : message.bytes - traffic.has;
    if (wanted > 0) {
      const ssize_t n = ::recv(peer.socket, to, wanted, MSG_DONTWAIT);
      if (n <= 0) {
        peer.silent = n == 0 || errno != EAGAIN;
        return;
      }
      (header ? traffic.header_has : traffic.has) += static_cast<size_t>(n);
    }
    if (traffic.header_has < sizeof(Header)) return;
    const Header& said = traffic.header;
    if (said.kind != SenderOf(message.kind) || said.group != peer.groups ||
        said.bytes != message.bytes) {
      if (!mismatch_hangs_) {
        Abort("member %d, in its group %" PRIu64
              " with member %d, receives %zu bytes (kind %u); "
              "that one sends %" PRIu64 " bytes (kind %u) in its group %" PRIu64,
              rank_, peer.groups, rank, message.bytes, static_cast<unsigned>(message.kind),
              said.bytes, static_cast<unsigned>(said.kind), said.group);
      }
      peer.silent = true;
      return;
    }
    if (traffic.has < message.bytes) return;
    traffic.in.pop_front();
    traffic.header_has = traffic.has = 0;
  };
  while (!stopped_) {
    std::vector<pollfd> polled;
    std::vector<int> ranks;
    bool unfinished = false;
    for (int rank = 0; rank < size_; ++rank) {
      const Traffic& traffic = all[rank];
      if (traffic.out.empty() && traffic.in.empty()) continue;
      unfinished = true;
      if (peers_[rank].silent) continue;
      const int events = (traffic.out.empty() ? 0 : POLLOUT) | (traffic.in.empty() ? 0 : POLLIN);
      polled.push_back({peers_[rank].socket, static_cast<int16_t>(events), 0});
      ranks.push_back(rank);
    }
    if (!unfinished) return;
    ::poll(polled.data(), polled.size(), kPollMs);
    for (size_t i = 0; i < polled.size(); ++i) {
      Peer& peer = peers_[ranks[i]];
      Traffic& traffic = all[ranks[i]];
      if ((polled[i].revents & POLLOUT) != 0) write(peer, traffic);
      if ((polled[i].revents & (POLLIN | POLLHUP | POLLERR)) != 0 && !traffic.in.empty()) {
        read(ranks[i], peer, traffic);
      }
      if ((polled[i].revents & (POLLHUP | POLLERR)) != 0 && traffic.in.empty()) peer.silent = true;
    }
  }
}

}  // namespace dmuond::fake_nccl
