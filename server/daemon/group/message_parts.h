// Large messages of a stream between daemons. gRPC's limit holds for everybody who can connect, and
// so is small: larger messages travel as parts of at most 1 MiB. A proven daemon may send parts, up
// to a quota for one message.
//
//   for (const v1::MemberMessage& piece : CutIntoParts(message)) stream.Write(piece);
//   while (stream.Read(&message)) {
//     absl::StatusOr<bool> whole = parts.Take(message);     // false: more of it follows
//
// Threads: one at a time.
#ifndef DMUOND_SERVER_DAEMON_GROUP_MESSAGE_PARTS_H_
#define DMUOND_SERVER_DAEMON_GROUP_MESSAGE_PARTS_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "dmuond/v1/peer.pb.h"

namespace dmuond::server {

inline constexpr size_t kPartBytesMax = size_t{1} << 20;

// The message itself, if it is small enough; else its parts, in order. For MemberMessage and
// CoordinatorMessage.
template <typename Message>
std::vector<Message> CutIntoParts(Message message) {
  std::vector<Message> pieces;
  if (message.ByteSizeLong() <= kPartBytesMax) {
    pieces.push_back(std::move(message));
    return pieces;
  }
  const std::string bytes = message.SerializeAsString();
  for (size_t first = 0; first < bytes.size(); first += kPartBytesMax) {
    v1::MessagePart& part = *pieces.emplace_back().mutable_part();
    part.set_data(bytes.substr(first, kPartBytesMax));
    part.set_total(static_cast<int64_t>(bytes.size()));
    part.set_last(first + kPartBytesMax >= bytes.size());
  }
  return pieces;
}

// Puts the parts of one message together, and then those of the next.
class PartCollector {
 public:
  explicit PartCollector(int64_t bytes_max) : bytes_max_(bytes_max) {}
  // True: the part was the last one. RESOURCE_EXHAUSTED (PEER_MESSAGE_TOO_LARGE): the first part
  // says that the message is beyond the quota. INVALID_ARGUMENT (MESSAGE_PARTS_INVALID).
  absl::StatusOr<bool> Add(const v1::MessagePart& part);
  [[nodiscard]] bool begun() const { return total_ != 0; }
  // What Add() has put together. REQUIRES: it has returned true.
  [[nodiscard]] std::string TakeBytes();

 private:
  const int64_t bytes_max_;
  int64_t total_ = 0;  // of the message that has begun; 0: none has
  std::string bytes_;
};
[[nodiscard]] absl::Status PartsInvalid(const char* why);

template <typename Message>
class PartReader {
 public:
  explicit PartReader(int64_t bytes_max) : collector_(bytes_max) {}
  // True: `message` is whole; if it was a part, it was replaced by the whole. False: more follows.
  // After an error the stream is of no use.
  absl::StatusOr<bool> Take(Message& message) {
    if (!message.has_part()) {
      if (collector_.begun()) return PartsInvalid("another message stands between two parts");
      return true;
    }
    absl::StatusOr<bool> whole = collector_.Add(message.part());
    if (!whole.ok() || !*whole) return whole;
    if (!message.ParseFromString(collector_.TakeBytes()) || message.has_part()) {
      return PartsInvalid("together they are no message");
    }
    return true;
  }

 private:
  PartCollector collector_;
};

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_GROUP_MESSAGE_PARTS_H_
