// What two members of a rail say to each other with every group of messages that they exchange, so
// that each sees whether the other has started the same group: a tag, the group's number among
// those of the two, and the sizes of its messages in their order.
//
//   RailStamp stamp(tag, /*number=*/7);
//   stamp.AddSent(bytes); …
//   stamp.WriteTo(place);                             // goes to the peer
//   std::optional<RailStamp> other = RailStamp::ReadFrom(received);
//   if (other && !other->Answers(stamp)) …            // the peer does something else
#ifndef DMUOND_SERVER_LANE_RAIL_STAMP_H_
#define DMUOND_SERVER_LANE_RAIL_STAMP_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace dmuond::server::lane {

class RailStamp {
 public:
  // A place for a stamp, of the host's memory: the host reads it while the device writes it.
  static constexpr size_t kPlaceBytes = 64;

  RailStamp() = default;
  RailStamp(uint64_t tag, uint64_t number) : tag_(tag), number_(number) {}

  // A message of the group, in order. One of no bytes is none.
  void AddSent(uint64_t bytes) { Add(bytes, sent_bytes_, sent_sizes_); }
  void AddReceived(uint64_t bytes) { Add(bytes, received_bytes_, received_sizes_); }

  // Whether a peer whose stamp this is does its part of the group that `own` describes.
  [[nodiscard]] bool Answers(const RailStamp& own) const;
  // "group 7 of the two, tag 0x100000003, sends 4096 bytes and receives 0"
  [[nodiscard]] std::string Describe() const;

  void WriteTo(std::byte* place) const;
  // nullopt: none is there, or not the whole of one.
  static std::optional<RailStamp> ReadFrom(std::byte* place);

 private:
  static void Add(uint64_t bytes, uint64_t& total, uint64_t& sizes);
  // Never 0, which an empty place has.
  [[nodiscard]] uint64_t Hash() const;

  uint64_t tag_ = 0;
  uint64_t number_ = 0;
  uint64_t sent_bytes_ = 0;
  uint64_t received_bytes_ = 0;
  uint64_t sent_sizes_ = 0;  // hash of the sizes
  uint64_t received_sizes_ = 0;
};

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_LANE_RAIL_STAMP_H_
