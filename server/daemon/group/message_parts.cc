#include "server/daemon/group/message_parts.h"

#include "server/common/errors.h"

namespace dmuond::server {

absl::Status PartsInvalid(const char* why) {
  return Error(absl::StatusCode::kInvalidArgument, "MESSAGE_PARTS_INVALID",
               Say("a daemon sends parts of a message that do not fit: ", why));
}

absl::StatusOr<bool> PartCollector::Add(const v1::MessagePart& part) {
  if (part.total() > bytes_max_) {
    return Error(absl::StatusCode::kResourceExhausted, "PEER_MESSAGE_TOO_LARGE",
                 Say("a daemon sends a message of ", Named("bytes", part.total()),
                     " bytes, at most ", Named("limit_bytes", bytes_max_),
                     " are taken: a larger --peer_message_bytes_max, on all daemons"));
  }
  if (part.total() <= 0 || (begun() && part.total() != total_)) {
    return PartsInvalid("they name different sizes, or none");
  }
  total_ = part.total();
  const auto size = static_cast<int64_t>(bytes_.size() + part.data().size());
  if (part.data().empty() || part.data().size() > kPartBytesMax || size > total_ ||
      part.last() != (size == total_)) {
    return PartsInvalid("a part is empty, too long or missing");
  }
  bytes_ += part.data();  // not reserved before it comes: the size is only said
  return part.last();
}

std::string PartCollector::TakeBytes() {
  total_ = 0;
  return std::exchange(bytes_, {});
}

}  // namespace dmuond::server
