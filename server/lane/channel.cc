#include "server/lane/channel.h"

#include <poll.h>

#include <cstdint>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "dmuond/wire/frame.h"

namespace dmuond::server::lane {
namespace {

constexpr size_t kHeaderBytes = 8;

}  // namespace

bool Channel::Readable() const {
  pollfd poll{socket_.get(), POLLIN, 0};
  return ::poll(&poll, 1, 0) > 0;
}

absl::Status Channel::Receive(v1::LaneCommand& command, std::vector<wire::UniqueFd>& fds) {
  uint32_t header[2];
  fds.clear();
  RETURN_IF_ERROR(wire::internal::ReceiveAll(socket_.get(), reinterpret_cast<char*>(header),
                                             sizeof(header), fds));
  if (header[0] > wire::kFrameBytesMax || header[1] > wire::kFrameFdsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("frame of ", header[0], " bytes and ", header[1], " descriptors"));
  }
  in_.resize(header[0]);
  RETURN_IF_ERROR(wire::internal::ReceiveAll(socket_.get(), in_.data(), in_.size(), fds));
  if (fds.size() != header[1]) {
    return absl::InvalidArgumentError(
        absl::StrCat("a frame announced ", header[1], " descriptors and carried ", fds.size()));
  }
  if (!command.ParseFromString(in_)) {
    return absl::InvalidArgumentError(absl::StrCat("no LaneCommand in ", in_.size(), " bytes"));
  }
  return absl::OkStatus();
}

absl::Status Channel::Send(const v1::LaneReport& report) {
  const size_t size = report.ByteSizeLong();
  if (size > wire::kFrameBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("a report of ", size, " bytes"));
  }
  const uint32_t header[2] = {static_cast<uint32_t>(size), 0};
  out_.resize(kHeaderBytes + size);
  std::memcpy(out_.data(), header, sizeof(header));
  report.SerializeWithCachedSizesToArray(reinterpret_cast<uint8_t*>(out_.data() + kHeaderBytes));
  return wire::internal::SendAll(socket_.get(), out_.data(), out_.size(), {});
}

}  // namespace dmuond::server::lane
