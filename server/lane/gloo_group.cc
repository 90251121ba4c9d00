#include "server/lane/gloo_group.h"

#include <gloo/transport/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "server/lane/rail_blob.h"
#include "server/lane/tcp_watch.h"

namespace dmuond::server::lane {
namespace {

// How long members wait for each other once all of them have each other's addresses.
constexpr std::chrono::seconds kConnectTimeout{60};
// Messages have no deadline of their own: the daemons decide who is dead and end the lanes. Gloo
// closes all connections when a wait of its own times out.
constexpr std::chrono::hours kMessageTimeout{24 * 365};

// Gloo's waits block, so one thread waits, in the order in which groups were started.
class GlooGroup final : public PeerGroup {
 public:
  // Throws what Gloo throws.
  explicit GlooGroup(PeerGroupSetup setup)
      : rank_(setup.rank),
        size_(setup.size),
        silence_max_(setup.silence_max),
        notify_(std::move(setup.notify)) {
    gloo::transport::tcp::attr attributes(setup.bind_address.empty() ? "127.0.0.1"
                                                                     : setup.bind_address.c_str());
    device_ = gloo::transport::tcp::CreateDevice(attributes);
    context_ = device_->createContext(rank_, size_);
    context_->setTimeout(std::chrono::duration_cast<std::chrono::milliseconds>(kConnectTimeout));
    for (int peer = 0; peer < size_; ++peer) {
      std::vector<char> address;
      if (peer != rank_) address = context_->createPair(peer)->address().bytes();
      AppendAddress(address, blob_);
    }
  }

  ~GlooGroup() override {
    Abort();
    if (thread_.joinable()) thread_.join();
  }

  void Abort() override {
    {
      MutexLock lock(mutex_);
      if (stop_) return;
      stop_ = true;
      if (failure_.ok()) failure_ = absl::AbortedError("rail: ended by this member");
      for (Operation& operation : operations_) {
        for (Pending& pending : operation.pending) {
          pending.send ? pending.buffer->abortWaitSend() : pending.buffer->abortWaitRecv();
        }
      }
      changed_.NotifyAll();
    }
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) context_->getPair(peer)->close();
    }
  }

  [[nodiscard]] const std::string& blob() const override { return blob_; }

  absl::Status Connect(const std::vector<std::string>& blobs) override {
    if (static_cast<int>(blobs.size()) != size_) {
      return absl::InvalidArgumentError(
          absl::StrCat("a rail of ", size_, " got ", blobs.size(), " addresses"));
    }
    std::vector<std::vector<char>> addresses(size_);
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      auto address =
          ReadAddress(blobs[peer], rank_, context_->getPair(peer)->address().bytes().size());
      if (!address.has_value()) {
        return absl::InvalidArgumentError(
            absl::StrCat("rail: member ", peer, " sent no address for member ", rank_));
      }
      addresses[peer] = *std::move(address);
    }
    thread_ = std::thread([this, addresses = std::move(addresses)] { Serve(addresses); });
    return absl::OkStatus();
  }

  [[nodiscard]] absl::StatusOr<bool> Ready() override {
    MutexLock lock(mutex_);
    if (!failure_.ok()) return failure_;
    return connected_;
  }

  absl::StatusOr<int64_t> Start(uint64_t tag, std::span<const Message> messages) override {
    return StartOperation(tag, messages, {});
  }

  absl::StatusOr<int64_t> Reduce(uint64_t tag, std::span<const float> in, std::span<float> out,
                                 int root) override {
    RETURN_IF_ERROR(CheckRoot(root));
    const size_t bytes = in.size() * sizeof(float);
    if (rank_ != root) {
      auto* data = reinterpret_cast<std::byte*>(const_cast<float*>(in.data()));
      const Message message{true, root, data, bytes};
      return StartOperation(tag, {&message, 1}, {});
    }
    if (out.size() != in.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("rail: ", in.size(), " values to add up into ", out.size()));
    }
    Sum sum{in, out, std::vector<std::vector<float>>(size_)};
    std::vector<Message> messages;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      sum.received[peer].resize(in.size());
      messages.push_back(
          {false, peer, reinterpret_cast<std::byte*>(sum.received[peer].data()), bytes});
    }
    return StartOperation(tag, messages, std::move(sum));
  }

  absl::StatusOr<int64_t> Broadcast(uint64_t tag, std::span<std::byte> data, int root) override {
    RETURN_IF_ERROR(CheckRoot(root));
    std::vector<Message> messages;
    if (rank_ != root) messages.push_back({false, root, data.data(), data.size()});
    for (int peer = 0; rank_ == root && peer < size_; ++peer) {
      if (peer != rank_) messages.push_back({true, peer, data.data(), data.size()});
    }
    return StartOperation(tag, messages, {});
  }

  [[nodiscard]] absl::StatusOr<bool> Done(int64_t ticket) override {
    MutexLock lock(mutex_);
    if (ticket <= done_) return true;
    if (!failure_.ok()) return failure_;
    return false;
  }

  [[nodiscard]] Silence silence() override {
    MutexLock lock(mutex_);
    const auto now = Clock::now();
    if (operations_.empty()) return {};
    TcpTraffic traffic = ReadTcpTraffic();
    if (std::exchange(crossed_, traffic.bytes) != traffic.bytes) {
      moved_ = now;
      return {};
    }
    return {std::chrono::duration_cast<std::chrono::milliseconds>(now - moved_),
            std::move(traffic.connections)};
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Pending {
    bool send = false;
    std::unique_ptr<gloo::transport::UnboundBuffer> buffer;
  };
  // What a root does with all members' values once they are there.
  struct Sum {
    std::span<const float> own;
    std::span<float> out;
    std::vector<std::vector<float>> received;  // by rank

    void Finish(int rank) const {
      std::vector<float> total(own.size());
      for (size_t member = 0; member < received.size(); ++member) {
        const float* values =
            static_cast<int>(member) == rank ? own.data() : received[member].data();
        for (size_t i = 0; i < total.size(); ++i) total[i] += values[i];
      }
      std::copy(total.begin(), total.end(), out.begin());
    }
  };
  struct Operation {
    int64_t ticket = 0;
    std::vector<Pending> pending;
    Sum sum;  // where `received` is not empty
  };

  [[nodiscard]] absl::Status CheckRoot(int root) const {
    if (root >= 0 && root < size_) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("rail: root ", root, " of ", size_));
  }

  absl::StatusOr<int64_t> StartOperation(uint64_t tag, std::span<const Message> messages, Sum sum)
      DMUOND_EXCLUDES(mutex_) {
    {
      MutexLock lock(mutex_);
      if (!failure_.ok()) return failure_;
    }
    Operation operation;
    operation.sum = std::move(sum);
    try {
      std::vector<uint32_t> sent(size_);
      std::vector<uint32_t> received(size_);
      for (const Message& message : messages) {
        Pending pending{message.send, context_->createUnboundBuffer(message.data, message.bytes)};
        uint32_t& count = message.send ? sent[message.peer] : received[message.peer];
        const uint64_t slot = (tag << 24) | count++;
        if (message.send) {
          pending.buffer->send(message.peer, slot);
        } else {
          pending.buffer->recv(message.peer, slot);
        }
        operation.pending.push_back(std::move(pending));
      }
    } catch (const std::exception& error) {
      return absl::AbortedError(absl::StrCat("rail: ", error.what()));
    }
    MutexLock lock(mutex_);
    if (!failure_.ok()) return failure_;
    operation.ticket = ++last_ticket_;
    if (operations_.empty()) moved_ = Clock::now();
    operations_.push_back(std::move(operation));
    changed_.NotifyAll();
    return last_ticket_;
  }

  void Serve(const std::vector<std::vector<char>>& addresses) DMUOND_EXCLUDES(mutex_) {
    try {
      for (int peer = 0; peer < size_; ++peer) {
        if (peer != rank_) context_->getPair(peer)->connect(addresses[peer]);
      }
    } catch (const std::exception& error) {
      Fail(error.what());
      return;
    }
    if (silence_max_.count() > 0) EndSilentConnections(silence_max_);
    {
      MutexLock lock(mutex_);
      connected_ = true;
    }
    notify_();
    while (WaitForOldest()) notify_();
    notify_();
  }

  // False: the group has failed or is to stop.
  bool WaitForOldest() DMUOND_EXCLUDES(mutex_) {
    Operation* oldest = nullptr;
    {
      MutexLock lock(mutex_);
      while (operations_.empty() && !stop_) changed_.Wait(mutex_);
      if (stop_) return false;
      oldest = &operations_.front();  // a deque: it stays while others are added behind it
    }
    try {
      for (Pending& pending : oldest->pending) {
        const bool complete = pending.send ? pending.buffer->waitSend(kMessageTimeout)
                                           : pending.buffer->waitRecv(kMessageTimeout);
        if (!complete) return false;  // aborted
      }
      if (!oldest->sum.received.empty()) oldest->sum.Finish(rank_);
    } catch (const std::exception& error) {
      Fail(error.what());
      return false;
    }
    MutexLock lock(mutex_);
    done_ = oldest->ticket;
    operations_.pop_front();
    return true;
  }

  void Fail(const char* what) DMUOND_EXCLUDES(mutex_) {
    {
      MutexLock lock(mutex_);
      if (failure_.ok()) failure_ = absl::AbortedError(absl::StrCat("rail: ", what));
    }
    notify_();
  }

  const int rank_;
  const int size_;
  const std::chrono::milliseconds silence_max_;
  const std::function<void()> notify_;
  std::shared_ptr<gloo::transport::Device> device_;
  std::shared_ptr<gloo::transport::Context> context_;
  std::string blob_;
  Mutex mutex_;
  CondVar changed_;
  bool connected_ DMUOND_GUARDED_BY(mutex_) = false;
  bool stop_ DMUOND_GUARDED_BY(mutex_) = false;
  absl::Status failure_ DMUOND_GUARDED_BY(mutex_);
  int64_t last_ticket_ DMUOND_GUARDED_BY(mutex_) = 0;
  int64_t done_ DMUOND_GUARDED_BY(mutex_) = 0;
  uint64_t crossed_ DMUOND_GUARDED_BY(mutex_) = 0;     // bytes, at the last look
  Clock::time_point moved_ DMUOND_GUARDED_BY(mutex_);  // when one had crossed since the last look
  std::deque<Operation> operations_ DMUOND_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PeerGroup>> MakeGlooGroup(PeerGroupSetup setup) {
  if (setup.size < 2 || setup.rank < 0 || setup.rank >= setup.size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rail: member ", setup.rank, " of ", setup.size));
  }
  const std::string address = setup.bind_address;
  try {
    return std::make_unique<GlooGroup>(std::move(setup));
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        absl::StrCat("rail: cannot listen on \"", address, "\": ", error.what()));
  }
}

}  // namespace dmuond::server::lane
