#include "server/daemon/group/direct_calls.h"

#include <fcntl.h>
#include <poll.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/common/errors.h"
#include "server/daemon/group/peer_channel.h"

namespace dmuond::server {
namespace {

using std::chrono::steady_clock;

constexpr std::chrono::seconds kCallTimeout{60};
// Nodes hear one after the other that the group has formed anew: so long a call waits for the last.
constexpr std::chrono::milliseconds kEpochPatience{5000};
constexpr std::chrono::milliseconds kCallAgainAfter{20};
constexpr std::chrono::seconds kAnswersWithin{5};  // to what asks for no more than an answer
constexpr int kClockTries = 16;                    // the first one makes the connection

// Whether the node that was called has answered, and not somebody else at its address. `awaited`:
// what PeerCalls::Prove() has returned.
absl::Status CheckReply(const grpc::ClientContext& context, int32_t node,
                        const std::string& awaited) {
  if (awaited.empty()) return absl::OkStatus();
  const auto& metadata = context.GetServerInitialMetadata();
  const auto found = metadata.find(kReplyProof);
  if (found != metadata.end() &&
      found->second == grpc::string_ref(awaited.data(), awaited.size())) {
    return absl::OkStatus();
  }
  return Error(absl::StatusCode::kUnavailable, "PEER_NOT_PROVEN",
               Say("who answers at the address of node ", Named("node", node),
                   " does not know the group's secret"));
}

}  // namespace

void DirectCalls::OnFormed(const v1::JoinReply& formed) {
  calls_.OnFormed(formed.epoch(), formed.nonce());
  MutexLock lock(mutex_);
  addresses_.assign(formed.peer_addresses().begin(), formed.peer_addresses().end());
  links_.clear();
  attempts_.clear();
}

void DirectCalls::Stop() {
  MutexLock lock(mutex_);
  stopped_ = true;
  changed_.NotifyAll();
}

absl::StatusOr<StateTensor> DirectCalls::ReadState(int32_t node,
                                                   const v1::ReadStateRequest& request,
                                                   size_t elements) {
  const auto deadline = steady_clock::now() + kEpochPatience;
  absl::StatusOr<StateTensor> tensor = ReadOnce(node, request, elements);
  while (MayCallAgain(tensor.status(), deadline)) tensor = ReadOnce(node, request, elements);
  return tensor;
}

absl::Status DirectCalls::WriteState(int32_t node, const v1::WriteStateRequest& request) {
  const auto deadline = steady_clock::now() + kEpochPatience;
  absl::Status status = WriteOnce(node, request);
  while (MayCallAgain(status, deadline)) status = WriteOnce(node, request);
  return status;
}

bool DirectCalls::MayCallAgain(const absl::Status& status, steady_clock::time_point deadline) {
  if (ReasonOf(status) != "PEER_EPOCH_DIFFERS") return false;
  MutexLock lock(mutex_);
  if (!stopped_) changed_.WaitUntil(mutex_, steady_clock::now() + kCallAgainAfter);
  return !stopped_ && steady_clock::now() < deadline;
}

bool DirectCalls::Link::ended() const {
  pollfd polled{held.get(), POLLRDHUP, 0};
  return ::poll(&polled, 1, 0) > 0;
}

absl::StatusOr<std::unique_ptr<v1::Direct::Stub>> DirectCalls::StubOf(int32_t node) {
  const auto stub_over = [](const absl::StatusOr<std::shared_ptr<grpc::Channel>>& channel)
      -> absl::StatusOr<std::unique_ptr<v1::Direct::Stub>> {
    if (!channel.ok()) return channel.status();
    return v1::Direct::NewStub(*channel);
  };
  const auto own = std::make_shared<Attempt>();
  std::string address;
  {
    MutexLock lock(mutex_);
    if (node < 0 || node >= static_cast<int32_t>(addresses_.size())) {
      return Error(absl::StatusCode::kUnavailable, "PEER_LOST",
                   Say("the group has not formed: node ", Named("node", node), " is not known"));
    }
    const auto link = links_.find(node);
    if (link != links_.end() && !link->second.ended()) return stub_over(link->second.channel);
    if (const auto found = attempts_.find(node); found != attempts_.end()) {
      const std::shared_ptr<Attempt> others = found->second;
      if (others->waiting >= kWaitingMax) {
        return Error(absl::StatusCode::kResourceExhausted, "PEER_CALLS_TOO_MANY",
                     Say("there is no connection to node ", Named("node", node), " yet, and ",
                         Named("waiting", others->waiting), " calls wait for it already"));
      }
      ++others->waiting;
      while (!others->made.has_value()) changed_.Wait(mutex_);
      return stub_over(*others->made);
    }
    attempts_[node] = own;
    address = addresses_[node];
  }
  absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = Connect(node, address);
  MutexLock lock(mutex_);
  own->made = channel;
  // Where the group has formed anew meanwhile, another one may be under way.
  if (const auto found = attempts_.find(node); found != attempts_.end() && found->second == own) {
    attempts_.erase(found);
  }
  changed_.NotifyAll();
  return stub_over(channel);
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> DirectCalls::Connect(int32_t node,
                                                                    const std::string& address) {
  absl::StatusOr<wire::UniqueFd> connected = connections_.Connect(address, node);
  if (absl::IsUnauthenticated(
          connected.status())) {  // of a trainer's call that would be said of him
    return Error(absl::StatusCode::kUnavailable, "PEER_NOT_PROVEN",
                 scheduler::MessageOf(connected.status()));
  }
  if (!connected.ok()) return connected.status();
  Link link;
  link.held = wire::UniqueFd(::fcntl(connected->get(), F_DUPFD_CLOEXEC, 0));
  if (!link.held.valid()) return absl::ErrnoToStatus(errno, "dup");
  link.channel = ChannelOver(*std::move(connected));
  std::shared_ptr<grpc::Channel> channel = link.channel;
  MutexLock lock(mutex_);
  // The group may have formed anew meanwhile: then this one is for these calls alone.
  const bool same = node < static_cast<int32_t>(addresses_.size()) && addresses_[node] == address;
  if (same) links_[node] = std::move(link);
  return channel;
}

absl::StatusOr<std::vector<v1::LaneTrace>> DirectCalls::TraceNode(int32_t node,
                                                                  v1::TraceNodeRequest request,
                                                                  const std::stop_token& stop) {
  absl::StatusOr<std::unique_ptr<v1::Direct::Stub>> stub = StubOf(node);
  if (!stub.ok()) return stub.status();
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::milliseconds(request.timeout_ms()) + kAnswersWithin);
  const std::stop_callback cancels(stop, [&context] { context.TryCancel(); });
  const std::string awaited = calls_.Prove("TraceNode", node, request);
  auto reader = (*stub)->TraceNode(&context, request);
  std::vector<v1::LaneTrace> lanes;
  v1::TraceNodeReply reply;
  while (reader->Read(&reply)) lanes.push_back(std::move(*reply.mutable_lane()));
  const grpc::Status status = reader->Finish();
  if (!status.ok()) return FromGrpc(status);
  if (absl::Status proven = CheckReply(context, node, awaited); !proven.ok()) return proven;
  return lanes;
}

absl::StatusOr<ClockAhead> DirectCalls::ReadClock(int32_t node) {
  absl::StatusOr<std::unique_ptr<v1::Direct::Stub>> stub = StubOf(node);
  if (!stub.ok()) return stub.status();
  std::optional<ClockAhead> best;
  for (int i = 0; i < kClockTries; ++i) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kAnswersWithin);
    v1::ReadClockRequest request;
    const std::string awaited = calls_.Prove("ReadClock", node, request);
    v1::ReadClockReply reply;
    const int64_t asked = MonotonicUs();
    const grpc::Status status = (*stub)->ReadClock(&context, request, &reply);
    const int64_t answered = MonotonicUs();
    if (!status.ok()) return FromGrpc(status);
    if (absl::Status proven = CheckReply(context, node, awaited); !proven.ok()) return proven;
    const int64_t half = (answered - asked) / 2;
    if (!best.has_value() || half < best->error_us) {
      best = ClockAhead{reply.monotonic_us() - (asked + half), half};
    }
  }
  return *best;
}

absl::StatusOr<StateTensor> DirectCalls::ReadOnce(int32_t node, v1::ReadStateRequest request,
                                                  size_t elements) {
  absl::StatusOr<std::unique_ptr<v1::Direct::Stub>> stub = StubOf(node);
  if (!stub.ok()) return stub.status();
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kCallTimeout);
  const std::string awaited = calls_.Prove("ReadState", node, request);
  auto reader = (*stub)->ReadState(&context, request);
  StateTensor tensor(elements);
  v1::ReadStateReply reply;
  size_t received = 0;
  while (reader->Read(&reply)) {
    const auto first = static_cast<size_t>(reply.first_element());
    const size_t count = reply.data().size() / sizeof(float);
    if (first > elements || count > elements - first) {
      context.TryCancel();
      return absl::InternalError(absl::StrCat("node ", node, " sent state out of range"));
    }
    std::memcpy(tensor.data() + first, reply.data().data(), count * sizeof(float));
    received += count;
  }
  const grpc::Status status = reader->Finish();
  if (!status.ok()) return FromGrpc(status);
  if (absl::Status proven = CheckReply(context, node, awaited); !proven.ok()) return proven;
  if (received != elements) {
    return absl::InternalError(
        absl::StrCat("node ", node, " sent ", received, " of ", elements, " elements"));
  }
  return tensor;
}

absl::Status DirectCalls::WriteOnce(int32_t node, v1::WriteStateRequest request) {
  absl::StatusOr<std::unique_ptr<v1::Direct::Stub>> stub = StubOf(node);
  if (!stub.ok()) return stub.status();
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kCallTimeout);
  const std::string awaited = calls_.Prove("WriteState", node, request);
  v1::WriteStateReply reply;
  const grpc::Status status = (*stub)->WriteState(&context, request, &reply);
  return status.ok() ? CheckReply(context, node, awaited) : FromGrpc(status);
}

}  // namespace dmuond::server
