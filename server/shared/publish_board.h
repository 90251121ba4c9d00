// The publish board of a node: memory that all of its lanes map, and in which each lane writes how
// far it has published its part of each bucket. The lane that sees all parts done tells the
// trainers. Two lanes may see it at once, which is harmless.
//
// `attempt` is the last attempt published. A republish, to a trainer that came later, is of an
// attempt that was published before, so it needs another mark: `republished` counts them. That
// works because all lanes of a node get the same republish commands in the same order.
//
// Threads: an entry has one writer, its lane; all lanes read. Stores and loads are sequentially
// consistent: of two lanes that store and then look, one sees both.
#ifndef DMUOND_SERVER_SHARED_PUBLISH_BOARD_H_
#define DMUOND_SERVER_SHARED_PUBLISH_BOARD_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace dmuond::server::lane {

struct BoardEntry {
  std::atomic<uint64_t> attempt;
  std::atomic<uint64_t> republished;
};
static_assert(sizeof(BoardEntry) == 16);

constexpr size_t PublishBoardBytes(int32_t buckets, int32_t lanes_per_node) {
  return static_cast<size_t>(buckets) * lanes_per_node * sizeof(BoardEntry);
}

class PublishBoard {
 public:
  PublishBoard() = default;
  PublishBoard(void* base, int32_t lanes_per_node)
      : entries_(static_cast<BoardEntry*>(base)), lanes_(lanes_per_node) {}
  [[nodiscard]] BoardEntry& entry(int32_t bucket, int32_t lane_index) const {
    return entries_[(static_cast<size_t>(bucket) * lanes_) + lane_index];
  }

 private:
  BoardEntry* entries_ = nullptr;
  int32_t lanes_ = 1;
};

}  // namespace dmuond::server::lane

#endif  // DMUOND_SERVER_SHARED_PUBLISH_BOARD_H_
