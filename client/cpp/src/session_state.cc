// Weights and optimizer state that travel outside of steps.
#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "client/cpp/src/session_impl.h"
#include "client/cpp/src/status.h"

namespace dmuond::client {
namespace {

constexpr size_t kChunkBytes = size_t{1} << 20;
// A group that is forming anew may refuse to read state; it has formed by then.
constexpr std::chrono::seconds kReformedWithin{30};
constexpr std::chrono::milliseconds kReformPause{250};

uint64_t Epoch(uint64_t attempt) { return attempt >> 32; }

// Whether a push failed through nobody's mistake.
bool MayPushAgain(const absl::Status& status) {
  const std::string reason = ReasonOf(status);
  if (reason == "PUSH_ABORTED") return MetadataOf(status)["retry"] == "true";
  return reason == "ATTEMPT_OUT_OF_ORDER";
}

bool IsReforming(const absl::Status& status) {
  const std::string reason = ReasonOf(status);
  return absl::IsUnavailable(status) && (reason == "LANE_LOST" || reason == "PEER_LOST" ||
                                         reason == "NODE_NOT_READY" || reason == "GROUP_NOT_READY");
}

// The values as on the wire: fp32, but fp64 for the count of updates.
std::string WireBytes(const StateTensor& tensor) {
  if (tensor.kind == StateKind::kStep) {
    const double updates = tensor.values.empty() ? 0 : tensor.values.front();
    return {reinterpret_cast<const char*>(&updates), sizeof(updates)};
  }
  return {reinterpret_cast<const char*>(tensor.values.data()),
          tensor.values.size() * sizeof(float)};
}

void AddChunks(const StateTensor& tensor, const std::string& name,
               std::vector<v1::PushParametersRequest>& messages) {
  const std::string bytes = WireBytes(tensor);
  const size_t element = tensor.kind == StateKind::kStep ? sizeof(double) : sizeof(float);
  for (size_t first = 0; first < bytes.size(); first += kChunkBytes) {
    v1::StateChunk& chunk = *messages.emplace_back().add_chunks();
    chunk.set_parameter(name);
    chunk.set_fragment(tensor.fragment);
    chunk.set_kind(static_cast<v1::StateKind>(tensor.kind));
    chunk.set_first_element(static_cast<int64_t>(first / element));
    chunk.set_data(bytes.substr(first, kChunkBytes));
  }
}

}  // namespace

absl::Status Session::Impl::TryPush(std::vector<v1::PushParametersRequest>& messages) {
  absl::Status status = CheckOpen("Push");
  if (!status.ok()) return status;
  SessionMemory& memory = link_->memory();
  v1::PushParametersRequest& first = messages.front();
  // A group that forms anew publishes its masters: what is pushed must outlive that.
  SessionMemory::Copies pushed;
  if (in_job_ && !first.state()) {
    ASSIGN_OR_RETURN(pushed, memory.CopyArenas());
    RETURN_IF_ERROR(CheckNotRepublished());
  }
  v1::PushParametersReply reply;
  for (;;) {
    const uint64_t attempt = next_attempt_;
    *first.mutable_key() = link_->Key();
    first.set_step(last_committed_step_);
    first.set_attempt(attempt);
    status = link_->channel().Push(messages, reply);
    if (status.ok()) break;
    undecided_ = false;
    Follow(status);
    if (!MayPushAgain(status) || next_attempt_ <= attempt) return status;
    if (pushed.empty() || Epoch(next_attempt_) == Epoch(attempt)) continue;
    published_attempt_ = next_attempt_ - 1;
    status = TryWaitPublished(PublishedWithin());
    if (!status.ok()) return status;
    if (status = memory.Restore(pushed); !status.ok()) return status;
  }
  in_job_ = true;
  next_attempt_ = reply.next_attempt();
  last_committed_step_ = reply.last_committed_step();
  published_attempt_ = reply.next_attempt() - 1;
  return TryWaitPublished(PublishedWithin());
}

absl::Status Session::Impl::CheckNotRepublished() {
  const uint64_t newest = link_->memory().ArrivedAttempts().newest;
  if (newest <= arrived_attempt_ || newest >= wire::kPoison) return absl::OkStatus();
  // What is written from now on is to stay.
  published_attempt_ = newest;
  RETURN_IF_ERROR(TryWaitPublished(PublishedWithin()));
  return MakeError(
      absl::StatusCode::kFailedPrecondition, "WEIGHTS_REPUBLISHED",
      absl::StrCat("Push: the group has formed anew since step ", last_committed_step_,
                   ", and its masters may have been published over the weights to push: write "
                   "them again"));
}

absl::Status Session::Impl::PushWeights(const std::vector<std::string>* parameters) {
  RETURN_IF_ERROR(CheckAttached("Push"));
  std::vector<v1::PushParametersRequest> messages(1);
  messages[0].set_all_weights(parameters == nullptr);
  if (parameters != nullptr) {
    for (const std::string& name : *parameters) messages[0].add_weights(name);
  }
  ForgetState();
  return Settle(TryPush(messages));
}

absl::Status Session::Impl::PushState(const std::vector<StateTensor>& tensors) {
  RETURN_IF_ERROR(CheckAttached("PushState"));
  std::vector<v1::PushParametersRequest> messages(1);
  messages[0].set_state(true);
  for (const StateTensor& tensor : tensors) {
    if (!link_->memory().Holds(tensor.parameter, tensor.fragment)) {
      return absl::InvalidArgumentError(absl::StrCat("state of fragment ", tensor.fragment,
                                                     " of parameter ", tensor.parameter,
                                                     ", which this trainer does not hold"));
    }
    const std::string& name = link_->memory().layout().parameters[tensor.parameter].name;
    const size_t wanted = tensor.kind == StateKind::kStep
                              ? 1
                              : link_->memory().Elements(tensor.parameter, tensor.fragment);
    if (tensor.values.size() != wanted) {
      return absl::InvalidArgumentError(absl::StrCat(
          "state of parameter '", name, "' has ", tensor.values.size(), " values, not ", wanted));
    }
    AddChunks(tensor, name, messages);
  }
  ForgetState();
  return Settle(TryPush(messages));
}

absl::StatusOr<std::vector<float>> Session::Impl::Pull(int32_t parameter, StateKind kind,
                                                       int32_t fragment) {
  absl::Status status = CheckAttached("Pull");
  if (!status.ok()) return status;
  if (!link_->memory().Holds(parameter, fragment)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "fragment ", fragment, " of parameter ", parameter, ", which this trainer does not hold"));
  }
  const auto give_up = std::chrono::steady_clock::now() + kReformedWithin;
  for (;;) {
    absl::StatusOr<std::vector<float>> values = TryPull(parameter, kind, fragment);
    if (values.ok()) return values;
    if (!IsReforming(values.status()) || std::chrono::steady_clock::now() > give_up) {
      status = Settle(values.status());
      if (!carried_on_) return status;
      continue;
    }
    std::this_thread::sleep_for(kReformPause);
  }
}

absl::StatusOr<std::vector<float>> Session::Impl::TryPull(int32_t parameter, StateKind kind,
                                                          int32_t fragment) {
  RETURN_IF_ERROR(CheckOpen("Pull"));
  const std::string& name = link_->memory().layout().parameters[parameter].name;
  v1::PullParametersRequest request;
  *request.mutable_key() = link_->Key();
  request.add_parameters(name);
  request.add_kinds(static_cast<v1::StateKind>(kind));
  std::string bytes;
  RETURN_IF_ERROR(link_->channel().Pull(request, [&](const v1::PullParametersReply& reply) {
    if (reply.chunk().fragment() != fragment) return absl::OkStatus();
    if (reply.chunk().first_element() == 0) bytes.clear();  // from the beginning again
    bytes += reply.chunk().data();
    return absl::OkStatus();
  }));
  if (kind == StateKind::kStep) {
    double updates = 0;
    if (bytes.size() == sizeof(updates)) {
      std::memcpy(&updates, bytes.data(), sizeof(updates));
      return std::vector<float>{static_cast<float>(updates)};
    }
  } else if (bytes.size() == link_->memory().Elements(parameter, fragment) * sizeof(float)) {
    std::vector<float> values(bytes.size() / sizeof(float));
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  return MakeError(
      absl::StatusCode::kNotFound, "NO_SUCH_STATE",
      absl::StrCat("parameter '", name, "' has no such state: ", bytes.size(), " bytes came"));
}

}  // namespace dmuond::client
