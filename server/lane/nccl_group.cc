#include "server/lane/nccl_group.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/cuda/cuda_stream.h"
#include "server/lane/nccl_library.h"
#include "server/lane/rail_stamp.h"

namespace dmuond::server::lane {
namespace {

// How long members wait for each other once all of them have each other's blobs. NCCL itself waits
// for as long as it takes.
constexpr std::chrono::seconds kConnectTimeout{120};
// Of the group in which all members first meet.
constexpr uint64_t kWarmUpTag = ~uint64_t{0};

// What members exchange by way of the daemons. Only member 0's id counts.
struct Blob {
  char magic[8] = {'d', 'm', 'u', 'o', 'n', 'c', 'c', 'l'};
  int32_t version = 0;  // of the library
  NcclUniqueId id{};
};

// Communicators that NCCL is ending, in this process.
std::atomic<int> ending{0};

// Everything runs on the lane's thread, but the end of a communicator: NCCL takes half a second and
// more for it, most of which its own threads sleep before they look whether they should end.
class NcclGroup final : public PeerGroup {
 public:
  NcclGroup(const Nccl& nccl, const PeerGroupSetup& setup)
      : nccl_(nccl),
        rank_(setup.rank),
        size_(setup.size),
        device_(*setup.device),
        stream_(*setup.stream),
        stamps_sent_(size_),
        stamps_received_(size_) {}

  // Waits until the stream has ended what it holds, which an abort makes it do at once; the memory
  // of messages is free then. NCCL ends the rest of the communicator while the lane goes on. Where
  // it still ends an earlier one, this one is waited for: if NCCL hangs, so does the lane, and the
  // daemon replaces it.
  ~NcclGroup() override {
    Abort();
    if (aborter_.joinable()) {
      if (may_still_issue_ || ending > 1) {
        aborter_.join();
      } else {
        aborter_.detach();
      }
    }
    stream_.Synchronize().IgnoreError();  // the device has failed otherwise
  }

  absl::Status MakeBlob() {
    Blob blob;
    blob.version = nccl_.version;
    if (rank_ == 0) {
      RETURN_IF_ERROR(
          nccl_.Check(nccl_.get_unique_id(&blob.id), "ncclGetUniqueId", /*comm=*/nullptr));
    }
    blob_.assign(reinterpret_cast<const char*>(&blob), sizeof(blob));
    return absl::OkStatus();
  }

  [[nodiscard]] const std::string& blob() const override { return blob_; }

  absl::Status Connect(const std::vector<std::string>& blobs) override {
    if (static_cast<int>(blobs.size()) != size_) {
      return absl::InvalidArgumentError(
          absl::StrCat("a rail of ", size_, " got ", blobs.size(), " addresses"));
    }
    NcclUniqueId id{};
    for (int peer = size_ - 1; peer >= 0; --peer) {
      Blob blob;
      const std::string magic(blob.magic, sizeof(blob.magic));
      if (blobs[peer].size() == sizeof(blob)) {
        std::memcpy(&blob, blobs[peer].data(), sizeof(blob));
      }
      if (blobs[peer].size() != sizeof(blob) || magic != std::string(blob.magic, magic.size())) {
        return absl::InvalidArgumentError(
            absl::StrCat("rail: what member ", peer, " sent is not NCCL's"));
      }
      if (blob.version != nccl_.version) {
        return absl::FailedPreconditionError(absl::StrCat(
            "rail: member ", rank_, " has NCCL ", Nccl::VersionText(nccl_.version), ", member ",
            peer, " has ", Nccl::VersionText(blob.version), ": all nodes need the same"));
      }
      id = blob.id;
    }
    NcclConfig config;
    config.blocking = 0;
    connect_until_ = std::chrono::steady_clock::now() + kConnectTimeout;
    RETURN_IF_ERROR(Checked(nccl_.comm_init_rank_config(&comm_, size_, id, rank_, &config),
                            "ncclCommInitRankConfig"));
    return StartWarmUp();
  }

  [[nodiscard]] absl::StatusOr<bool> Ready() override {
    if (connected_) return failure_.ok() ? absl::StatusOr<bool>(true) : failure_;
    RETURN_IF_ERROR(Advance());
    connected_ = comm_ != nullptr && done_ >= 1;
    if (!connected_ && comm_ != nullptr && std::chrono::steady_clock::now() > connect_until_) {
      return Fail(absl::AbortedError(absl::StrCat(
          "rail: its ", size_, " members have not met within ", kConnectTimeout.count(),
          " s. NCCL_SOCKET_IFNAME in the daemons' environment names the network interface; with "
          "NCCL_DEBUG=INFO there NCCL says what it waits for")));
    }
    return connected_;
  }

  absl::StatusOr<int64_t> Start(uint64_t tag, std::span<const Message> messages) override {
    for (const Message& message : messages) {
      if (message.peer >= 0 && message.peer < size_ && message.peer != rank_) continue;
      return absl::InvalidArgumentError(absl::StrCat("rail: member ", rank_, " of ", size_,
                                                     " has a message for member ", message.peer));
    }
    ASSIGN_OR_RETURN(Operation* const operation, Enqueue(Kind::kMessages, tag));
    operation->messages.assign(messages.begin(), messages.end());
    return Begin();
  }

  absl::StatusOr<int64_t> Reduce(uint64_t tag, std::span<const float> in, std::span<float> out,
                                 int root) override {
    RETURN_IF_ERROR(CheckRoot(root));
    if (rank_ == root && out.size() != in.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("rail: ", in.size(), " values to add up into ", out.size()));
    }
    ASSIGN_OR_RETURN(Operation* const operation, Enqueue(Kind::kReduce, tag));
    operation->in = in.data();
    operation->out = rank_ == root ? out.data() : nullptr;
    operation->count = in.size();
    operation->root = root;
    return Begin();
  }

  absl::StatusOr<int64_t> Broadcast(uint64_t tag, std::span<std::byte> data, int root) override {
    RETURN_IF_ERROR(CheckRoot(root));
    ASSIGN_OR_RETURN(Operation* const operation, Enqueue(Kind::kBroadcast, tag));
    operation->in = data.data();
    operation->out = data.data();
    operation->count = data.size();
    operation->root = root;
    return Begin();
  }

  [[nodiscard]] absl::StatusOr<bool> Done(int64_t ticket) override {
    if (ticket <= done_) return true;
    RETURN_IF_ERROR(Advance());
    return ticket <= done_;
  }

  [[nodiscard]] bool needs_polls() const override {
    return failure_.ok() && (!waiting_.empty() || issued_ != nullptr || !running_.empty());
  }

  void Abort() override {
    if (failure_.ok()) {
      Collect().IgnoreError();  // what is through, is through
      Fail(absl::AbortedError("rail: ended by this member")).IgnoreError();
    }
    if (comm_ == nullptr) return;
    if (issued_ != nullptr) {
      NcclResult state = NcclResult::kInProgress;
      may_still_issue_ = nccl_.comm_get_async_error(comm_, &state) != NcclResult::kSuccess ||
                         state == NcclResult::kInProgress;
    }
    ++ending;
    aborter_ = std::thread([abort = nccl_.comm_abort, comm = std::exchange(comm_, nullptr)] {
      abort(comm);
      --ending;
    });
  }

 private:
  enum class Kind : uint8_t { kMessages, kReduce, kBroadcast };
  // One ticket's work, used again for later ones.
  struct Operation {
    Kind kind = Kind::kMessages;
    uint64_t tag = 0;
    int64_t ticket = 0;
    std::vector<Message> messages;
    const void* in = nullptr;
    void* out = nullptr;
    size_t count = 0;
    int root = 0;
    std::unique_ptr<kernels::Event> event;
    // By peer, a place for the stamp that it gets and one for the stamp that comes from it.
    std::unique_ptr<kernels::Mapping> places;
    std::vector<std::optional<RailStamp>> sent;      // by peer
    std::vector<std::optional<RailStamp>> expected;  // by peer, what its stamp must answer
  };

  [[nodiscard]] absl::Status CheckRoot(int root) const {
    if (root >= 0 && root < size_) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("rail: root ", root, " of ", size_));
  }
  absl::Status Fail(const absl::Status& why) {
    if (failure_.ok()) failure_ = why;
    return failure_;
  }
  // Whatever NCCL reports is the group's end.
  absl::Status Checked(NcclResult result, const char* call) {
    absl::Status status = nccl_.Check(result, call, comm_);
    if (status.ok()) return status;
    return Fail(absl::AbortedError(absl::StrCat("rail: ", status.message())));
  }

  [[nodiscard]] static std::byte* PlaceTo(const Operation& operation, int peer) {
    return operation.places->data() + RailStamp::kPlaceBytes * (2 * peer);
  }
  [[nodiscard]] static std::byte* PlaceFrom(const Operation& operation, int peer) {
    return PlaceTo(operation, peer) + RailStamp::kPlaceBytes;
  }

  absl::StatusOr<Operation*> Enqueue(Kind kind, uint64_t tag) {
    if (!failure_.ok()) return failure_;
    if (free_.empty()) {
      auto made = std::make_unique<Operation>();
      ASSIGN_OR_RETURN(made->event, device_.CreateEvent());
      ASSIGN_OR_RETURN(made->places, device_.AllocateHost(RailStamp::kPlaceBytes * 2 * size_));
      free_.push_back(std::move(made));
    }
    std::unique_ptr<Operation> operation = std::move(free_.back());
    free_.pop_back();
    operation->kind = kind;
    operation->tag = tag;
    operation->messages.clear();
    operation->ticket = ++last_ticket_;
    waiting_.push_back(std::move(operation));
    return waiting_.back().get();
  }

  // Of the operation that was enqueued last.
  absl::StatusOr<int64_t> Begin() {
    const int64_t ticket = last_ticket_;
    RETURN_IF_ERROR(Advance());
    return ticket;
  }

  // NCCL connects members when they first exchange something.
  absl::Status StartWarmUp() {
    ASSIGN_OR_RETURN(Operation* const operation, Enqueue(Kind::kMessages, kWarmUpTag));
    for (int peer = 0; peer < size_; ++peer) {
      // Without bytes of its own: the stamps are what is exchanged.
      if (peer != rank_) operation->messages.push_back({true, peer, nullptr, 0});
    }
    return Begin().status();
  }

  // Does what can be done now: sees that what was handed to NCCL is in the stream, hands over what
  // is next, and looks what the device has done.
  absl::Status Advance() {
    if (!failure_.ok()) return failure_;
    if (comm_ == nullptr) return absl::OkStatus();
    for (;;) {
      NcclResult state = NcclResult::kSuccess;
      absl::Status asked =
          Checked(nccl_.comm_get_async_error(comm_, &state), "ncclCommGetAsyncError");
      if (asked.ok()) asked = Checked(state, issued_ == nullptr ? "NCCL" : "ncclGroupEnd");
      if (!asked.ok()) return asked;
      if (state == NcclResult::kInProgress) break;
      if (issued_ != nullptr) {
        // Before this it might not have been in the stream yet.
        if (absl::Status recorded = stream_.Record(*issued_->event); !recorded.ok()) {
          return Fail(recorded);
        }
        running_.push_back(std::move(issued_));
      }
      if (waiting_.empty()) break;
      issued_ = std::move(waiting_.front());
      waiting_.pop_front();
      RETURN_IF_ERROR(Issue(*issued_));
    }
    return Collect();
  }

  absl::Status Collect() {
    while (!running_.empty()) {
      Operation& operation = *running_.front();
      const absl::StatusOr<bool> done = operation.event->Done();
      if (!done.ok()) return Fail(done.status());
      if (absl::Status checked = CheckStamps(operation, *done); !checked.ok()) return Fail(checked);
      if (!*done) break;
      done_ = operation.ticket;
      free_.push_back(std::move(running_.front()));
      running_.pop_front();
    }
    return absl::OkStatus();
  }

  // One NCCL group: stamps first, so that they are through before what may never be.
  absl::Status Issue(Operation& operation) {
    WriteStamps(operation);
    CUstream const stream = kernels::cuda::CudaStream::Of(stream_);
    absl::Status status = Checked(nccl_.group_start(), "ncclGroupStart");
    if (!status.ok()) return status;
    for (int peer = 0; peer < size_; ++peer) {
      if (operation.sent[peer].has_value()) {
        status.Update(Send(PlaceTo(operation, peer), RailStamp::kPlaceBytes, peer));
      }
      if (operation.expected[peer].has_value()) {
        status.Update(Receive(PlaceFrom(operation, peer), RailStamp::kPlaceBytes, peer));
      }
    }
    for (const Message& message : operation.messages) {
      if (message.bytes == 0) continue;
      status.Update(message.send ? Send(message.data, message.bytes, message.peer)
                                 : Receive(message.data, message.bytes, message.peer));
    }
    if (operation.kind == Kind::kReduce) {
      status.Update(
          Checked(nccl_.reduce(operation.in, operation.out, operation.count, NcclType::kFloat32,
                               NcclOp::kSum, operation.root, comm_, stream),
                  "ncclReduce"));
    } else if (operation.kind == Kind::kBroadcast) {
      status.Update(Checked(nccl_.broadcast(operation.in, operation.out, operation.count,
                                            NcclType::kUint8, operation.root, comm_, stream),
                            "ncclBroadcast"));
    }
    status.Update(Checked(nccl_.group_end(), "ncclGroupEnd"));
    return status;
  }

  absl::Status Send(const std::byte* data, size_t bytes, int peer) {
    return Checked(nccl_.send(data, bytes, NcclType::kUint8, peer, comm_,
                              kernels::cuda::CudaStream::Of(stream_)),
                   "ncclSend");
  }
  absl::Status Receive(std::byte* data, size_t bytes, int peer) {
    return Checked(nccl_.recv(data, bytes, NcclType::kUint8, peer, comm_,
                              kernels::cuda::CudaStream::Of(stream_)),
                   "ncclRecv");
  }

  // Messages: a stamp to and from every member that this one has messages with. A reduction or a
  // broadcast: to the next member and from the one before, so that all are compared.
  void WriteStamps(Operation& operation) {
    operation.sent.assign(size_, std::nullopt);
    operation.expected.assign(size_, std::nullopt);
    if (operation.kind == Kind::kMessages) {
      for (const Message& message : operation.messages) {
        std::optional<RailStamp>& stamp = operation.sent[message.peer];
        if (!stamp.has_value()) stamp.emplace(operation.tag, ++stamps_sent_[message.peer]);
        message.send ? stamp->AddSent(message.bytes) : stamp->AddReceived(message.bytes);
      }
      for (int peer = 0; peer < size_; ++peer) {
        if (operation.sent[peer].has_value()) ++stamps_received_[peer];
      }
      operation.expected = operation.sent;
    } else {
      const int next = (rank_ + 1) % size_;
      const int previous = (rank_ + size_ - 1) % size_;
      const auto stamp = [&](uint64_t number) {
        RailStamp made(operation.tag, number);
        // Of all members the same: which operation, and how much.
        const uint64_t what = (static_cast<uint64_t>(operation.kind) << 32) + operation.root;
        for (const uint64_t value : {what, uint64_t{operation.count}}) {
          made.AddSent(value);
          made.AddReceived(value);
        }
        return made;
      };
      operation.sent[next] = stamp(++stamps_sent_[next]);
      operation.expected[previous] = stamp(++stamps_received_[previous]);
    }
    for (int peer = 0; peer < size_; ++peer) {
      if (operation.sent[peer].has_value()) operation.sent[peer]->WriteTo(PlaceTo(operation, peer));
      std::memset(PlaceFrom(operation, peer), 0, RailStamp::kPlaceBytes);
    }
  }

  // Checks the stamps that are there. `all`: the device has done everything, so all must be.
  absl::Status CheckStamps(Operation& operation, bool all) const {
    for (int peer = 0; peer < size_; ++peer) {
      std::optional<RailStamp>& expected = operation.expected[peer];
      if (!expected.has_value()) continue;
      const std::optional<RailStamp> stamp = RailStamp::ReadFrom(PlaceFrom(operation, peer));
      if (!stamp.has_value() && !all) continue;
      if (!stamp.has_value() || !stamp->Answers(*expected)) {
        return absl::InternalError(absl::StrCat(
            "rail: members ", rank_, " and ", peer, " have not started the same. Member ", rank_,
            ": ", expected->Describe(), ". Member ", peer, ": ",
            stamp.has_value() ? stamp->Describe() : "something without a stamp"));
      }
      expected.reset();
    }
    return absl::OkStatus();
  }

  const Nccl nccl_;
  const int rank_;
  const int size_;
  kernels::Device& device_;
  kernels::Stream& stream_;
  std::string blob_;
  NcclComm comm_ = nullptr;  // null: not made, or handed to the aborter
  std::chrono::steady_clock::time_point connect_until_;
  bool connected_ = false;
  absl::Status failure_;
  std::vector<uint64_t> stamps_sent_;      // how many, by peer
  std::vector<uint64_t> stamps_received_;  // the same
  int64_t last_ticket_ = 0;
  int64_t done_ = 0;
  // An operation waits, is with NCCL, runs on the device, and is free again; all in order.
  std::deque<std::unique_ptr<Operation>> waiting_;
  std::unique_ptr<Operation> issued_;
  std::deque<std::unique_ptr<Operation>> running_;
  std::vector<std::unique_ptr<Operation>> free_;
  std::thread aborter_;
  // Whether NCCL had yet to put into the stream what it was given when the group was aborted.
  bool may_still_issue_ = false;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PeerGroup>> MakeNcclGroupOf(const std::string& library,
                                                           const PeerGroupSetup& setup) {
  if (setup.size < 2 || setup.rank < 0 || setup.rank >= setup.size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rail: member ", setup.rank, " of ", setup.size));
  }
  ASSIGN_OR_RETURN(const Nccl nccl, Nccl::Load(library));
  auto group = std::make_unique<NcclGroup>(nccl, setup);
  RETURN_IF_ERROR(group->MakeBlob());
  return group;
}

absl::StatusOr<std::unique_ptr<PeerGroup>> MakeNcclGroup(const PeerGroupSetup& setup) {
  return MakeNcclGroupOf(kNcclLibrary, setup);
}

}  // namespace dmuond::server::lane
