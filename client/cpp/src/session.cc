#include "dmuond/client/session.h"

#include <utility>

#include "base/status_macros.h"
#include "client/cpp/src/session_impl.h"

namespace dmuond::client {

absl::StatusOr<std::unique_ptr<Session>> Session::Open(const Options& options) {
  ASSIGN_OR_RETURN(std::string path, SocketPath(options.address));
  auto impl = std::make_unique<Impl>(options);
  RETURN_IF_ERROR(impl->Open(path));
  return std::unique_ptr<Session>(new Session(std::move(impl)));
}

Session::Session(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Session::~Session() = default;

absl::StatusOr<Registered> Session::Register(const Layout& layout) {
  return impl_->Register(layout);
}
absl::Status Session::Attach(const FirstWeights& first) { return impl_->Attach(first); }
absl::Status Session::Push() { return impl_->PushWeights(nullptr); }
absl::Status Session::Push(const std::vector<std::string>& parameters) {
  return impl_->PushWeights(&parameters);
}

std::byte* Session::WeightBytes(int32_t parameter, int32_t fragment) const {
  return impl_->link().memory().Weight(parameter, fragment);
}
std::byte* Session::GradientBytes(int32_t parameter, int32_t fragment) const {
  return impl_->link().memory().Gradient(parameter, fragment);
}
size_t Session::Size(int32_t parameter, int32_t fragment) const {
  return impl_->link().memory().Elements(parameter, fragment);
}

void Session::MarkReady(int32_t bucket) {
  // An error of the device is Submit()'s, too.
  impl_->MarkReady(bucket, std::nullopt).IgnoreError();
}
absl::Status Session::MarkReady(int32_t bucket, CUstream_st* stream) {
  return impl_->MarkReady(bucket, stream);
}
absl::StatusOr<Outcome> Session::Submit(const StepScalars& scalars, const SubmitOptions& options) {
  return impl_->Submit(scalars, options);
}
absl::StatusOr<Outcome> Session::Wait(std::chrono::milliseconds wait) { return impl_->Wait(wait); }
absl::Status Session::WaitPublished(std::chrono::milliseconds timeout) {
  return impl_->WaitPublished(timeout);
}

absl::Status Session::WaitPublished(CUstream_st* stream) { return impl_->WaitPublished(stream); }

absl::StatusOr<Outcome> Session::Step(const StepScalars& scalars, const SubmitOptions& options) {
  return impl_->Step(scalars, options);
}

absl::StatusOr<std::vector<float>> Session::Pull(int32_t parameter, StateKind kind,
                                                 int32_t fragment) {
  return impl_->Pull(parameter, kind, fragment);
}
absl::Status Session::PushState(const std::vector<StateTensor>& tensors) {
  return impl_->PushState(tensors);
}
absl::StatusOr<Snapshot> Session::SaveSnapshot() { return impl_->SaveSnapshot(); }
absl::StatusOr<int64_t> Session::LoadSnapshot(int64_t step) { return impl_->LoadSnapshot(step); }
void Session::ReleaseStale() { impl_->ReleaseStale(); }
absl::Status Session::Close() { return impl_->Close(); }

int32_t Session::rank() const { return impl_->options_.rank; }
int32_t Session::world_size() const { return impl_->options_.world_size; }
int32_t Session::lanes() const { return impl_->link().hello().lanes(); }
const std::string& Session::device_type() const { return impl_->link().hello().device_type(); }
const std::string& Session::server() const { return impl_->link().hello().server(); }
const Registered& Session::registered() const { return impl_->registered_; }
bool Session::has_state() const { return impl_->link().opened().has_state(); }
int64_t Session::last_committed_step() const { return impl_->last_committed_step_; }
std::optional<int64_t> Session::durable_step() const { return impl_->durable_step_; }
const std::string& Session::trainer_state() const { return impl_->trainer_state_; }
uint64_t Session::next_attempt() const { return impl_->next_attempt_; }
const StepTiming& Session::last_timing() const { return impl_->timing_; }
bool Session::lost() const { return impl_->link().lost(); }

}  // namespace dmuond::client
