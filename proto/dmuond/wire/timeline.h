// The timeline page: 64-bit counters in memory that trainer, daemon and lanes share, one page set
// per attach. Part of the wire contract: a client in any language reads and writes these bytes.
//
// A word is 16 bytes: a little-endian uint64 `value` and a uint32 `changes` that is raised after
// every store of `value` (futexes are 32 bits wide: waiters sleep on `changes`), then 4 bytes of
// zero. Values are attempts, never step numbers. They only grow; kPoison ends a page for good, and
// a rollback is marked in `published` (RollbackMark).
//
//   offset 0      PageHeader
//   offset 64     submitted                 written by the trainer
//   offset 128    ready[0 .. buckets)       written by the trainer
//   then          published[0 .. buckets)   written by lanes (with marks by the daemon, with poison
//                                           by the daemon and the client's watcher)
//
// Threads: every function may be called from any thread and process that maps the page. A word has
// one writer at a time, except for poison, which anybody may store; `published` has several, who
// raise it by AdvanceTo().
#ifndef DMUOND_WIRE_TIMELINE_H_
#define DMUOND_WIRE_TIMELINE_H_

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <ctime>

namespace dmuond::wire {

inline constexpr uint64_t kPoison = uint64_t{1} << 62;
inline constexpr uint32_t kTimelineMagic = 0x4c544d44;  // "DMTL", little-endian
inline constexpr uint32_t kTimelineVersion = 2;
inline constexpr uint32_t kBucketsMax = 4096;

// What the daemon stores into `published` when the job goes back to an older step: more than every
// attempt before `epoch`, which begins with the rollback, and less than all that follow. It ends
// the waits of streams for weights that nobody will publish any more. It says of no attempt that
// its weights are there: a host that finds it asks the daemon, which says where to go on.
constexpr uint64_t RollbackMark(uint32_t epoch) { return (uint64_t{epoch} << 32) - 1; }
// An attempt's lower half counts attempts, and never comes so far.
constexpr bool IsRollbackMark(uint64_t value) { return (value & 0xffffffff) == 0xffffffff; }

struct alignas(16) TimelineWord {
  std::atomic<uint64_t> value;
  std::atomic<uint32_t> changes;
  uint32_t zero;
};
static_assert(sizeof(TimelineWord) == 16);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

struct PageHeader {
  uint32_t magic;
  uint32_t version;
  uint32_t buckets;  // how many ready words, and as many published words
  uint32_t zero[13];
};
static_assert(sizeof(PageHeader) == 64);

inline constexpr size_t kSubmittedOffset = 64;
inline constexpr size_t kReadyOffset = 128;

// Bytes of a page set with that many buckets (not rounded up to the size of a memory page).
constexpr size_t TimelineBytes(uint32_t buckets) {
  return kReadyOffset + size_t{2} * buckets * sizeof(TimelineWord);
}

// A view of a mapped page set. Does not own the mapping.
class TimelinePage {
 public:
  explicit TimelinePage(void* base) : base_(static_cast<std::byte*>(base)) {}

  [[nodiscard]] PageHeader& header() const { return *reinterpret_cast<PageHeader*>(base_); }
  [[nodiscard]] TimelineWord& submitted() const { return At(kSubmittedOffset); }
  [[nodiscard]] TimelineWord& ready(uint32_t bucket) const {
    return At(kReadyOffset + (bucket * sizeof(TimelineWord)));
  }
  // `buckets` is passed by the caller, who checked it once: the header is writable by the other
  // side.
  [[nodiscard]] TimelineWord& published(uint32_t bucket, uint32_t buckets) const {
    return At(kReadyOffset + ((size_t{buckets} + bucket) * sizeof(TimelineWord)));
  }

 private:
  [[nodiscard]] TimelineWord& At(size_t offset) const {
    return *reinterpret_cast<TimelineWord*>(base_ + offset);
  }
  std::byte* base_;
};

inline void WakeWaiters(TimelineWord& word) {
  word.changes.fetch_add(1, std::memory_order_release);
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word.changes), FUTEX_WAKE, INT_MAX, nullptr,
            nullptr, 0);
}

// Stores `value` and wakes every waiter. Everything written before is visible to who reads the
// value.
inline void Advance(TimelineWord& word, uint64_t value) {
  word.value.store(value, std::memory_order_release);
  WakeWaiters(word);
}

// Stores `value` unless the word is there already or further (poison stays), and wakes waiters.
inline void AdvanceTo(TimelineWord& word, uint64_t value) {
  uint64_t now = word.value.load(std::memory_order_relaxed);
  while (now < value) {
    if (!word.value.compare_exchange_weak(now, value, std::memory_order_release,
                                          std::memory_order_relaxed)) {
      continue;
    }
    WakeWaiters(word);
    return;
  }
}

[[nodiscard]] inline uint64_t Read(const TimelineWord& word) {
  return word.value.load(std::memory_order_acquire);
}

// Waits until the word is at least `target` (poison always is) or `deadline` has passed; returns
// the last value read. Polls briefly, then sleeps in the kernel.
inline uint64_t WaitAtLeast(const TimelineWord& word, uint64_t target,
                            std::chrono::steady_clock::time_point deadline) {
  constexpr int kPolls = 300;
  for (int i = 0; i < kPolls; ++i) {
    const uint64_t value = Read(word);
    if (value >= target) return value;
  }
  for (;;) {
    const uint32_t seen = word.changes.load(std::memory_order_acquire);
    const uint64_t value = Read(word);
    if (value >= target) return value;
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left <= std::chrono::nanoseconds::zero()) return value;
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
    const timespec timeout{static_cast<time_t>(ns / 1'000'000'000),
                           static_cast<long>(ns % 1'000'000'000)};  // NOLINT(google-runtime-int)
    // EAGAIN, EINTR and ETIMEDOUT all lead to the same next look at the word and the clock.
    ::syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word.changes), FUTEX_WAIT, seen,
              &timeout, nullptr, 0);
  }
}

}  // namespace dmuond::wire

#endif  // DMUOND_WIRE_TIMELINE_H_
