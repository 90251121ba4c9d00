// Bytes out of nowhere where frames are expected: on a lane's stream and on the attach socket. What
// comes is a message or a status; a length that is announced costs no memory.
#include <sys/socket.h>

#include <cstdint>
#include <cstdlib>
#include <string>

#include "dmuond/v1/attach.pb.h"
#include "dmuond/v1/lane.pb.h"
#include "dmuond/wire/frame.h"
#include "scheduler/convert/convert.h"

namespace dmuond {
namespace {

struct Pair {
  explicit Pair(int type) {
    int fds[2];
    if (::socketpair(AF_UNIX, type | SOCK_CLOEXEC, 0, fds) != 0) std::abort();
    writer.Reset(fds[0]);
    reader.Reset(fds[1]);
  }
  wire::UniqueFd writer;
  wire::UniqueFd reader;
};

// What both sides of a lane's socket do with what they have parsed.
void Convert(const std::string& body) {
  v1::LaneReport report;
  if (report.ParseFromString(body)) (void)FromProto(report.gathered().norms());
  v1::LaneCommand command;
  if (!command.ParseFromString(body)) return;
  if (command.has_submitted()) (void)FromProto(command.submitted());
  for (const v1::Go& go : command.goes().goes()) (void)FromProto(go);
  if (command.has_decision()) (void)FromProto(command.decision());
  if (command.has_configure()) (void)FromProto(command.configure().program());
}

void Stream(const std::string& bytes) {
  Pair pair(SOCK_STREAM);
  const int size = 4 << 20;  // all of an input fits: nobody reads while it is written
  ::setsockopt(pair.writer.get(), SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof(size));
  size_t sent = 0;
  while (sent < bytes.size()) {
    const ssize_t n = ::send(pair.writer.get(), bytes.data() + sent, bytes.size() - sent,
                             MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n <= 0) break;
    sent += static_cast<size_t>(n);
  }
  pair.writer.Reset();
  for (;;) {
    const absl::StatusOr<wire::Frame> frame = wire::ReceiveFrame(pair.reader.get());
    if (!frame.ok()) return;
    Convert(frame->body);
  }
}

void Packet(const std::string& bytes) {
  Pair pair(SOCK_SEQPACKET);
  if (::send(pair.writer.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
    return;
  }
  pair.writer.Reset();
  const absl::StatusOr<wire::Frame> packet = wire::ReceivePacket(pair.reader.get());
  v1::AttachFrame frame;
  if (packet.ok()) (void)frame.ParseFromString(packet->body);
}

}  // namespace
}  // namespace dmuond

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  dmuond::Stream(bytes);
  dmuond::Packet(bytes);
  dmuond::Convert(bytes);
  return 0;
}
