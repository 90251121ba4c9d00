// libnccl.so.2 of this folder does what rails ask of NCCL, between processes on the fake driver of
// ../driver: bytes go over sockets, as work of the caller's stream. As the real one does, a
// communicator with blocking=0 says that it is in progress when it is made and after every group,
// and nothing at all of a peer that has died: what waits for it waits until ncclCommAbort().
//
// It ends the process, with a reason, where the product does what it must never do:
//
//   * a communicator is used while it is in progress;
//   * a communicator has work in two streams, or a group is of two communicators;
//   * two members have other messages for each other in their n-th group, by kind or size
//     (FAKE_NCCL_MISMATCH=hang: they wait for ever, as the real one may).
//
// Environment, read when a communicator is made:
//   FAKE_NCCL_VERSION      as ncclGetVersion() says it; 22809
//   FAKE_NCCL_IN_PROGRESS  how often it is in progress at most, at random; 3. A group comes into
//   its
//                          stream when it is not any more
//   FAKE_NCCL_SEED         of these numbers; 1
//   FAKE_NCCL_MISMATCH     "hang", see above
//   FAKE_NCCL_ABORT_MS     how long ncclCommAbort() takes once the stream's work has ended; 0
#ifndef DMUOND_TESTS_FAKE_CUDA_NCCL_FAKE_NCCL_H_
#define DMUOND_TESTS_FAKE_CUDA_NCCL_FAKE_NCCL_H_

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace dmuond::fake_nccl {

// Ends the process with the reason.
[[noreturn]] void Abort(const char* format, ...) __attribute__((format(printf, 1, 2)));

// One message of a group, as one member has it.
struct Message {
  enum class Kind : uint32_t {
    kSend,
    kReceive,
    kReduceOut,
    kReduceIn,
    kBroadcastOut,
    kBroadcastIn
  };
  Kind kind = Kind::kSend;
  int peer = 0;
  std::byte* data = nullptr;  // where the device finds it
  size_t bytes = 0;
};

// The connections of one member to all others. Threads: Meet() on one, Exchange() on one later,
// Stop() on any.
class Mesh {
 public:
  Mesh(std::string id, int rank, int size, int version, const CUuuid& device);
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  // Connects to all others, however long that takes. Returns what makes it impossible; empty: done,
  // or stopped.
  std::string Meet();
  // Brings all messages over. Those of one peer are in order. Returns when it is done, or stopped.
  void Exchange(const std::vector<Message>& messages);
  // Ends both, now and from now on.
  void Stop() { stopped_ = true; }
  [[nodiscard]] bool stopped() const { return stopped_; }

 private:
  struct Peer {
    int socket = -1;
    bool silent = false;  // it has died, or waits for something else
    uint64_t groups = 0;  // in which there were messages for or from it
  };
  [[nodiscard]] std::string NameOf(int rank) const;
  std::string Greet(int socket, int expected);
  bool Connect(int peer);
  bool ReadAll(int socket, void* data, size_t bytes) const;

  const std::string id_;
  const int rank_;
  const int size_;
  const int version_;
  const CUuuid device_;
  int listener_ = -1;
  bool mismatch_hangs_ = false;
  std::vector<Peer> peers_;
  std::atomic<bool> stopped_{false};
};

}  // namespace dmuond::fake_nccl

#endif  // DMUOND_TESTS_FAKE_CUDA_NCCL_FAKE_NCCL_H_
