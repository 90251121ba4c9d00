// What a session maps and who holds what in it: arenas, timeline page, fragments, buckets.
//
// Threads: Poison() from any; the rest from the session's caller, MarkReady() as Session says.
#ifndef DMUOND_CLIENT_CPP_SRC_SESSION_MEMORY_H_
#define DMUOND_CLIENT_CPP_SRC_SESSION_MEMORY_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "client/cpp/src/attach_socket.h"
#include "client/cpp/src/host_arenas.h"
#include "client/cpp/src/mapping.h"
#include "dmuond/client/arenas.h"
#include "dmuond/client/layout.h"
#include "dmuond/client/types.h"
#include "dmuond/v1/trainer.pb.h"
#include "dmuond/wire/timeline.h"

namespace dmuond::client {

class SessionMemory {
 public:
  SessionMemory() = default;
  ~SessionMemory();  // REQUIRES: the watcher has ended
  SessionMemory(const SessionMemory&) = delete;
  SessionMemory& operator=(const SessionMemory&) = delete;

  using Stream = std::optional<CUstream_st*>;
  // Before SetLayout(). Null: host memory.
  void SetArenas(std::shared_ptr<Arenas> arenas);
  // Before Map(): what the layout says, and the buckets that the daemon made of it.
  void SetLayout(Layout layout, const Registered& registered);
  [[nodiscard]] const Layout& layout() const { return layout_; }
  [[nodiscard]] int32_t bucket_of(int32_t parameter) const { return bucket_of_[parameter]; }

  // The arenas that the request is to name: exports those that lie in the trainer's own memory, and
  // has them. An error names the arena. REQUIRES: SetLayout().
  absl::Status FillArenas(v1::AttachBuffersRequest& request);
  // One frame of the attach socket; complete when all arenas and the timeline are there.
  absl::Status Map(const AttachSocket::Received& received);
  [[nodiscard]] bool complete() const;

  // Null and 0 where this trainer holds nothing.
  [[nodiscard]] std::byte* Weight(int32_t parameter, int32_t fragment) const;
  [[nodiscard]] std::byte* Gradient(int32_t parameter, int32_t fragment) const;
  [[nodiscard]] size_t Elements(int32_t parameter, int32_t fragment) const;
  [[nodiscard]] bool Holds(int32_t parameter, int32_t fragment) const {
    return Find(parameter, fragment) != nullptr;
  }

  // REQUIRES (all below): complete().
  // A stream of the arenas' device: when what is enqueued there is done. Without one at once, which
  // cannot fail in host memory. SESSION_STATE: a stream, and arenas in host memory.
  absl::Status MarkReady(int32_t bucket, uint64_t attempt, Stream stream = {});
  // All buckets that are not marked yet for this attempt, except those in `held_back`.
  absl::Status MarkAllReady(const std::vector<uint8_t>& held_back, uint64_t attempt, Stream stream);
  [[nodiscard]] bool IsMarked(int32_t bucket, uint64_t attempt) const {
    return marked_[bucket] == attempt;
  }
  absl::Status MarkSubmitted(uint64_t attempt, Stream stream);
  [[nodiscard]] size_t buckets() const { return held_.size(); }

  // kNo: not by the deadline, or not any more, because the job goes back.
  enum class Published : uint8_t { kYes, kNo, kPoisoned };
  [[nodiscard]] Published WaitPublished(uint64_t attempt,
                                        std::chrono::steady_clock::time_point deadline) const;
  // The same of the stream, which the host does not wait for; a poisoned page and a rollback end
  // its wait, too.
  absl::Status EnqueueWait(uint64_t attempt, CUstream_st* stream);
  // Marks and waits are a device's, which can fail.
  [[nodiscard]] bool by_streams() const { return words_ != nullptr; }
  // CUDA_FAILED: marks and waits that are enqueued never happen.
  absl::Status CheckDevice();
  // Returns when no stream has a mark or a wait left to do.
  absl::Status FinishStreams();

  // Attempts whose weights have arrived, of the bucket that is furthest behind and of the one that
  // is ahead; wire::kPoison where the page has ended.
  struct Arrived {
    uint64_t oldest = 0;
    uint64_t newest = 0;
  };
  [[nodiscard]] Arrived ArrivedAttempts() const;

  // The arenas' bytes by id, and back.
  using Copies = std::map<uint32_t, std::vector<std::byte>>;
  [[nodiscard]] absl::StatusOr<Copies> CopyArenas() const;
  absl::Status Restore(const Copies& copies);

  // These arenas in the place of `kept`'s, at the same addresses. What those held stays, gradients
  // too; but weights are those that have been published to these, because the predecessor may have
  // died while it wrote others. REQUIRES: of one layout.
  absl::Status TakeOver(SessionMemory& kept);

  // Ends every wait of this page, for good. Allocates nothing.
  void Poison();

 private:
  [[nodiscard]] const Fragment* Find(int32_t parameter, int32_t fragment) const;
  [[nodiscard]] std::byte* At(const Fragment* fragment, const Slice& slice) const;
  [[nodiscard]] wire::TimelinePage page() const { return wire::TimelinePage(timeline_.data()); }
  // `attempt` into the words, now or when the stream has come so far.
  absl::Status Store(std::span<wire::TimelineWord* const> words, uint64_t attempt, Stream stream);

  Layout layout_;
  std::vector<std::vector<int32_t>> fragments_of_;  // parameter -> its fragments in the layout
  std::vector<int32_t> bucket_of_;                  // parameter -> bucket or -1
  std::vector<uint8_t> held_;                       // bucket -> this trainer holds some of it
  std::vector<uint64_t> marked_;                    // bucket -> the last attempt it was marked for

  std::shared_ptr<Arenas> source_ = std::make_shared<HostArenas>();
  std::map<uint32_t, std::unique_ptr<Arenas::Memory>> arenas_;
  Mapping timeline_;
  std::unique_ptr<Arenas::Words> words_;  // of the timeline; null: no streams
  // Once the page is mapped; poisoned before that: it is when it comes.
  std::atomic<std::byte*> page_base_{nullptr};
  std::atomic<bool> poisoned_{false};
};

}  // namespace dmuond::client

#endif  // DMUOND_CLIENT_CPP_SRC_SESSION_MEMORY_H_
