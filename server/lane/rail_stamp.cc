#include "server/lane/rail_stamp.h"

#include <array>
#include <atomic>

#include "absl/strings/str_cat.h"

namespace dmuond::server::lane {
namespace {

uint64_t Mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15U;
  return hash ^ (hash >> 29);
}

// In the place: what the stamp says, and a hash of it.
using Words = std::array<uint64_t, 7>;
static_assert(sizeof(Words) <= RailStamp::kPlaceBytes);

}  // namespace

void RailStamp::Add(uint64_t bytes, uint64_t& total, uint64_t& sizes) {
  if (bytes == 0) return;
  total += bytes;
  sizes = Mix(sizes + 1, bytes);
}

uint64_t RailStamp::Hash() const {
  uint64_t hash = 0;
  for (const uint64_t value :
       {tag_, number_, sent_bytes_, received_bytes_, sent_sizes_, received_sizes_}) {
    hash = Mix(hash + 1, value);
  }
  return hash | 1;
}

bool RailStamp::Answers(const RailStamp& own) const {
  return tag_ == own.tag_ && number_ == own.number_ && sent_bytes_ == own.received_bytes_ &&
         sent_sizes_ == own.received_sizes_ && received_bytes_ == own.sent_bytes_ &&
         received_sizes_ == own.sent_sizes_;
}

std::string RailStamp::Describe() const {
  return absl::StrCat("group ", number_, " of the two, tag 0x", absl::Hex(tag_), ", sends ",
                      sent_bytes_, " bytes and receives ", received_bytes_);
}

void RailStamp::WriteTo(std::byte* place) const {
  const Words words = {tag_,        number_,         sent_bytes_, received_bytes_,
                       sent_sizes_, received_sizes_, Hash()};
  for (size_t i = 0; i < words.size(); ++i) {
    std::atomic_ref(reinterpret_cast<uint64_t*>(place)[i]).store(words[i]);
  }
}

std::optional<RailStamp> RailStamp::ReadFrom(std::byte* place) {
  Words words;
  for (size_t i = 0; i < words.size(); ++i) {
    words[i] = std::atomic_ref(reinterpret_cast<uint64_t*>(place)[i]).load();
  }
  RailStamp stamp(words[0], words[1]);
  stamp.sent_bytes_ = words[2];
  stamp.received_bytes_ = words[3];
  stamp.sent_sizes_ = words[4];
  stamp.received_sizes_ = words[5];
  if (words[6] != stamp.Hash()) return std::nullopt;
  return stamp;
}

}  // namespace dmuond::server::lane
