// Weights and optimizer state that travel outside of steps.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/src/session_impl.h"
#include "client/cpp/src/status.h"

namespace dmuond::client {
namespace {

constexpr size_t kChunkBytes = size_t{1} << 20;

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
    v1::StateChunk& chunk = *messages.emplace_back().mutable_chunk();
    chunk.set_parameter(name);
    chunk.set_fragment(tensor.fragment);
    chunk.set_kind(static_cast<v1::StateKind>(tensor.kind));
    chunk.set_first_element(static_cast<int64_t>(first / element));
    chunk.set_data(bytes.substr(first, kChunkBytes));
  }
}

}  // namespace

absl::Status Session::Impl::Push(const std::vector<v1::PushParametersRequest>& messages) {
  v1::PushParametersReply reply;
  absl::Status status = channel_->Push(messages, reply);
  if (!status.ok()) return Refused(std::move(status));
  next_attempt_ = reply.next_attempt();
  last_committed_step_ = reply.last_committed_step();
  published_attempt_ = reply.next_attempt() - 1;
  return WaitPublished(std::chrono::minutes(10));
}

absl::Status Session::Impl::PushWeights(const std::vector<std::string>* parameters) {
  absl::Status status = CheckAttached("Push");
  if (!status.ok()) return status;
  std::vector<v1::PushParametersRequest> messages(1);
  *messages[0].mutable_key() = Key();
  messages[0].set_step(last_committed_step_);
  messages[0].set_attempt(next_attempt_);
  messages[0].set_all_weights(parameters == nullptr);
  if (parameters != nullptr) {
    for (const std::string& name : *parameters) messages[0].add_weights(name);
  }
  return Push(messages);
}

absl::Status Session::Impl::PushState(const std::vector<StateTensor>& tensors) {
  absl::Status status = CheckAttached("PushState");
  if (!status.ok()) return status;
  std::vector<v1::PushParametersRequest> messages(1);
  *messages[0].mutable_key() = Key();
  messages[0].set_step(last_committed_step_);
  messages[0].set_attempt(next_attempt_);
  messages[0].set_state(true);
  for (const StateTensor& tensor : tensors) {
    if (!memory_.Holds(tensor.parameter, tensor.fragment)) {
      return absl::InvalidArgumentError(absl::StrCat("state of fragment ", tensor.fragment,
                                                     " of parameter ", tensor.parameter,
                                                     ", which this trainer does not hold"));
    }
    const std::string& name = memory_.layout().parameters[tensor.parameter].name;
    const size_t wanted =
        tensor.kind == StateKind::kStep ? 1 : memory_.Elements(tensor.parameter, tensor.fragment);
    if (tensor.values.size() != wanted) {
      return absl::InvalidArgumentError(absl::StrCat(
          "state of parameter '", name, "' has ", tensor.values.size(), " values, not ", wanted));
    }
    AddChunks(tensor, name, messages);
  }
  return Push(messages);
}

absl::StatusOr<std::vector<float>> Session::Impl::Pull(int32_t parameter, StateKind kind,
                                                       int32_t fragment) {
  absl::Status status = CheckAttached("Pull");
  if (!status.ok()) return status;
  if (!memory_.Holds(parameter, fragment)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "fragment ", fragment, " of parameter ", parameter, ", which this trainer does not hold"));
  }
  const std::string& name = memory_.layout().parameters[parameter].name;
  v1::PullParametersRequest request;
  *request.mutable_key() = Key();
  request.add_parameters(name);
  request.add_kinds(static_cast<v1::StateKind>(kind));
  std::string bytes;
  status = channel_->Pull(request, [&](const v1::PullParametersReply& reply) {
    if (reply.chunk().fragment() != fragment) return absl::OkStatus();
    if (reply.chunk().first_element() == 0) bytes.clear();  // from the beginning again
    bytes += reply.chunk().data();
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  if (kind == StateKind::kStep) {
    double updates = 0;
    if (bytes.size() == sizeof(updates)) {
      std::memcpy(&updates, bytes.data(), sizeof(updates));
      return std::vector<float>{static_cast<float>(updates)};
    }
  } else if (bytes.size() == memory_.Elements(parameter, fragment) * sizeof(float)) {
    std::vector<float> values(bytes.size() / sizeof(float));
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  return MakeError(
      absl::StatusCode::kNotFound, "NO_SUCH_STATE",
      absl::StrCat("parameter '", name, "' has no such state: ", bytes.size(), " bytes came"));
}

}  // namespace dmuond::client
