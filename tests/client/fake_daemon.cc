#include "tests/client/fake_daemon.h"

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/unique_fd.h"
#include "dmuond/v1/attach.pb.h"
#include "dmuond/v1/trainer.grpc.pb.h"
#include "dmuond/wire/frame.h"
#include "dmuond/wire/layout_parts.h"
#include "dmuond/wire/timeline.h"
#include "grpcpp/grpcpp.h"
#include "server/common/errors.h"

namespace dmuond::testing {
namespace {

constexpr uint32_t kBuckets = 1;
// The arenas, as LayoutBuilder numbers them.
constexpr uint32_t kGradients = 1;
constexpr uint32_t kWeights = 2;
constexpr uint64_t kEpoch = uint64_t{1} << 32;

wire::UniqueFd Listen(const std::string& path) {
  ::unlink(path.c_str());  // a predecessor's
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  wire::UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      ::listen(socket.get(), 8) != 0) {
    std::abort();
  }
  return socket;
}

struct Shared {
  wire::UniqueFd fd;
  std::byte* data = nullptr;
  size_t size = 0;

  explicit Shared(size_t bytes) : fd(::memfd_create("fake", MFD_CLOEXEC)), size(bytes) {
    if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) std::abort();
    void* mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    if (mapped == MAP_FAILED) std::abort();
    data = static_cast<std::byte*>(mapped);
  }
  Shared(Shared&& other) noexcept
      : fd(std::move(other.fd)), data(std::exchange(other.data, nullptr)), size(other.size) {}
  Shared& operator=(Shared&&) = delete;
  ~Shared() {
    if (data != nullptr) ::munmap(data, size);
  }
};

grpc::Status Refusal(absl::StatusCode code, const char* reason, const std::string& message,
                     const server::ErrorMetadata& metadata = {}) {
  return server::ToGrpc(server::Error(code, reason, message, metadata));
}
grpc::Status Draining() {
  return Refusal(absl::StatusCode::kUnavailable, "DRAINING", "this daemon is leaving");
}

}  // namespace

class FakeDaemon::Impl final : public v1::Trainer::Service {
  using Context = grpc::ServerContext;

 public:
  Impl(const std::string& path, State state)
      : listener_(Listen(path + ".attach")),
        step_(state.step),
        trainer_state_(std::move(state.trainer_state)),
        has_state_(state.step > 0),
        published_timeout_ms_(state.published_timeout_ms),
        version_(state.version),
        late_claims_(state.late_claims),
        attempt_((state.epoch * kEpoch) + 2) {
    ::unlink(path.c_str());
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + path, grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) std::abort();
    accepting_ = std::thread([this] { Accept(); });
  }
  ~Impl() override { Die(); }

  void Die() {
    if (server_ == nullptr) return;
    // Nobody finds it any more when its trainer hears of its end.
    ::shutdown(listener_.get(), SHUT_RDWR);
    accepting_.join();
    listener_ = wire::UniqueFd();
    {
      MutexLock lock(mutex_);
      if (client_.valid()) ::shutdown(client_.get(), SHUT_RDWR);
      client_ = wire::UniqueFd();
    }
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
    server_.reset();
  }
  void GoBackTo(int64_t step, const std::string& trainer_state, bool asked) {
    MutexLock lock(mutex_);
    goes_back_to_ = step;
    asked_ = asked;
    ++back_epoch_;
    trainer_state_ = trainer_state;
    const auto epoch = static_cast<uint32_t>(attempt_ / kEpoch + 1);  // its attempts'
    wire::AdvanceTo(Page().published(0, kBuckets), wire::RollbackMark(epoch));
  }
  void BeginEpoch() {
    MutexLock lock(mutex_);
    BeginEpochLocked();
  }
  void Set(bool Impl::*flag, bool value) {
    MutexLock lock(mutex_);
    this->*flag = value;
  }

  // ---- the service ----

  grpc::Status Hello(Context* /*context*/, const v1::HelloRequest* request,
                     v1::HelloReply* reply) override {
    if (request->version_max() < version_ || request->version_min() > version_) {
      return Refusal(
          absl::StatusCode::kFailedPrecondition, "VERSION_MISMATCH",
          absl::StrCat("the client speaks protocol versions ", request->version_min(), " to ",
                       request->version_max(), ", this daemon speaks ", version_),
          {{"server_version", absl::StrCat(version_)}});
    }
    reply->set_version(version_);
    reply->set_lanes(1);
    return grpc::Status::OK;
  }
  grpc::Status OpenSession(Context* /*context*/, const v1::OpenSessionRequest* request,
                           v1::OpenSessionReply* reply) override {
    MutexLock lock(mutex_);
    if (opens_++ < late_claims_) {
      return Refusal(absl::StatusCode::kUnauthenticated, "CLAIM_EXPIRED", "it comes too late");
    }
    if (std::exchange(draining_, false)) return Draining();
    if (request->resume() == v1::OpenSessionRequest::RESUME_REQUIRE && !has_state_) {
      return Refusal(absl::StatusCode::kFailedPrecondition, "JOB_HAS_NO_STATE",
                     "there is nothing to resume");
    }
    reply->set_session(7);
    reply->set_incarnation(1);
    reply->set_has_state(has_state_);
    reply->set_last_committed_step(step_);
    reply->set_trainer_state(trainer_state_);
    if (has_state_) reply->set_durable_step(step_);
    reply->set_published_timeout_ms(published_timeout_ms_);
    return grpc::Status::OK;
  }
  grpc::Status RegisterLayout(
      Context* /*context*/,
      grpc::ServerReaderWriter<v1::RegisterLayoutReply, v1::RegisterLayoutRequest>* stream)
      override {
    v1::RegisterLayoutRequest request;
    wire::ReadParts(*stream, request);
    {
      MutexLock lock(mutex_);
      if (std::exchange(draining_, false)) return Draining();
    }
    v1::RegisterLayoutReply reply;
    for (int i = 0; i < request.parameters_size(); ++i) reply.add_parameter_bucket(0);
    reply.set_buckets(kBuckets);
    wire::WriteParts(*stream, reply);
    return grpc::Status::OK;
  }
  grpc::Status AttachBuffers(Context* /*context*/, const v1::AttachBuffersRequest* request,
                             v1::AttachBuffersReply* reply) override {
    MutexLock lock(mutex_);
    for (const v1::Arena& arena : request->arenas()) {
      const Shared& memory =
          arenas_.emplace(arena.id(), static_cast<size_t>(arena.size_bytes())).first->second;
      v1::AttachFrame frame;
      frame.mutable_arena()->set_arena(arena.id());
      frame.mutable_arena()->set_size_bytes(arena.size_bytes());
      Send(frame, memory);
    }
    page_.emplace(wire::TimelineBytes(kBuckets));
    wire::PageHeader& header = wire::TimelinePage(page_->data).header();
    header.magic = wire::kTimelineMagic;
    header.version = wire::kTimelineVersion;
    header.buckets = kBuckets;
    v1::AttachFrame frame;
    frame.mutable_timeline()->set_buckets(kBuckets);
    frame.mutable_timeline()->set_size_bytes(static_cast<int64_t>(page_->size));
    Send(frame, *page_);
    if (has_state_ && !hold_publishing_) Publish(attempt_ - 1);
    reply->set_next_attempt(attempt_);
    reply->set_published(has_state_);
    reply->set_last_committed_step(step_);
    reply->set_trainer_state(trainer_state_);
    return grpc::Status::OK;
  }
  grpc::Status PushParameters(Context* /*context*/,
                              grpc::ServerReader<v1::PushParametersRequest>* reader,
                              v1::PushParametersReply* reply) override {
    v1::PushParametersRequest first;
    v1::PushParametersRequest rest;
    reader->Read(&first);
    while (reader->Read(&rest)) continue;
    MutexLock lock(mutex_);
    if (goes_back_to_.has_value()) return MustAcknowledge();
    if (std::exchange(abort_push_, false)) {
      BeginEpochLocked();
      return Refusal(absl::StatusCode::kUnavailable, "PUSH_ABORTED", "a new epoch",
                     {{"next_attempt", absl::StrCat(attempt_)}, {"retry", "true"}});
    }
    if (first.attempt() != attempt_) {
      return Refusal(absl::StatusCode::kFailedPrecondition, "ATTEMPT_OUT_OF_ORDER",
                     absl::StrCat("attempt ", first.attempt()),
                     {{"next_attempt", absl::StrCat(attempt_)}});
    }
    const std::span<const float> weights = Weights();
    pushed_.assign(weights.begin(), weights.end());
    has_state_ = true;
    wire::Advance(Page().published(0, kBuckets), attempt_++);
    reply->set_next_attempt(attempt_);
    reply->set_last_committed_step(step_);
    return grpc::Status::OK;
  }
  grpc::Status SubmitStep(Context* /*context*/, const v1::SubmitStepRequest* request,
                          v1::SubmitStepReply* reply) override {
    MutexLock lock(mutex_);
    submits_.push_back(*request);
    if (std::exchange(draining_, false)) return Draining();
    v1::Outcome& outcome = *reply->mutable_outcome();
    if (goes_back_to_.has_value()) {
      outcome.set_kind(v1::Outcome::KIND_ROLLED_BACK);
      outcome.set_to_step(*goes_back_to_);
      if (!asked_) outcome.set_reason(v1::Outcome::REASON_PEER_LOST);
      outcome.set_epoch(back_epoch_);
      return grpc::Status::OK;
    }
    if (request->attempt() != attempt_ || request->step() != step_ + 1) {
      return Refusal(absl::StatusCode::kFailedPrecondition,
                     request->step() == step_ + 1 ? "ATTEMPT_OUT_OF_ORDER" : "STEP_OUT_OF_ORDER",
                     absl::StrCat("step ", request->step(), ", attempt ", request->attempt()),
                     {{"next_attempt", absl::StrCat(attempt_)}});
    }
    outcome.set_step(request->step());
    outcome.set_attempt(attempt_);
    if (std::exchange(abort_submit_, false)) {
      BeginEpochLocked();
      outcome.set_kind(v1::Outcome::KIND_ABORTED);
      outcome.set_reason(v1::Outcome::REASON_PEER_LOST);
      outcome.set_retry(true);
    } else {
      if (wire::Read(Page().ready(0)) != attempt_) std::abort();  // a bucket was not signalled
      outcome.set_kind(v1::Outcome::KIND_COMMITTED);
      ++step_;
      if (!hold_publishing_) Publish(attempt_);
      ++attempt_;
    }
    outcome.set_next_attempt(attempt_);
    return grpc::Status::OK;
  }
  grpc::Status WaitStep(Context* /*context*/, const v1::WaitStepRequest* request,
                        v1::WaitStepReply* reply) override {
    MutexLock lock(mutex_);
    if (!goes_back_to_.has_value()) {
      return Refusal(absl::StatusCode::kFailedPrecondition, "STEP_OUT_OF_ORDER",
                     absl::StrCat("step ", request->step(), " was not submitted"));
    }
    reply->mutable_outcome()->set_kind(v1::Outcome::KIND_ROLLED_BACK);
    reply->mutable_outcome()->set_to_step(*goes_back_to_);
    if (!asked_) reply->mutable_outcome()->set_reason(v1::Outcome::REASON_PEER_LOST);
    reply->mutable_outcome()->set_epoch(back_epoch_);
    return grpc::Status::OK;
  }
  grpc::Status AckRollback(Context* /*context*/, const v1::AckRollbackRequest* request,
                           v1::AckRollbackReply* reply) override {
    MutexLock lock(mutex_);
    if (request->to_step() != goes_back_to_ || request->epoch() != back_epoch_) {
      return MustAcknowledge();
    }
    acknowledged_.push_back(request->to_step());
    step_ = *std::exchange(goes_back_to_, std::nullopt);
    BeginEpochLocked();
    reply->set_next_attempt(attempt_);
    reply->set_trainer_state(trainer_state_);
    return grpc::Status::OK;
  }
  grpc::Status LoadSnapshot(Context* /*context*/, const v1::LoadSnapshotRequest* request,
                            v1::LoadSnapshotReply* reply) override {
    GoBackTo(request->step(), "of the snapshot", /*asked=*/true);
    MutexLock lock(mutex_);
    loads_.push_back(request->call());
    reply->set_step(request->step());
    return grpc::Status::OK;
  }
  grpc::Status CloseSession(Context* /*context*/, const v1::CloseSessionRequest* /*request*/,
                            v1::CloseSessionReply* /*reply*/) override {
    MutexLock lock(mutex_);
    ++closes_;
    return grpc::Status::OK;
  }

  std::vector<v1::SubmitStepRequest> submits() {
    MutexLock lock(mutex_);
    return submits_;
  }
  std::vector<int64_t> acknowledged() {
    MutexLock lock(mutex_);
    return acknowledged_;
  }
  std::vector<uint64_t> loads() {
    MutexLock lock(mutex_);
    return loads_;
  }
  std::vector<float> pushed() {
    MutexLock lock(mutex_);
    return pushed_;
  }
  int opens() {
    MutexLock lock(mutex_);
    return opens_;
  }
  std::vector<float> gradients() {
    MutexLock lock(mutex_);
    const Shared& arena = arenas_.at(kGradients);
    const auto* first = reinterpret_cast<const float*>(arena.data);
    return {first, first + (arena.size / sizeof(float))};
  }
  int closes() {
    MutexLock lock(mutex_);
    return closes_;
  }

  bool abort_submit_ DMUOND_GUARDED_BY(mutex_) = false;
  bool abort_push_ DMUOND_GUARDED_BY(mutex_) = false;
  bool hold_publishing_ DMUOND_GUARDED_BY(mutex_) = false;
  bool draining_ DMUOND_GUARDED_BY(mutex_) = false;

 private:
  void Accept() {
    for (;;) {
      wire::UniqueFd client(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!client.valid()) return;
      v1::AttachFrame welcome;
      welcome.mutable_welcome()->set_nonce("0123456789abcdef");
      MutexLock lock(mutex_);
      client_ = std::move(client);
      // One that has gone already is none.
      wire::SendPacket(client_.get(), welcome.SerializeAsString()).IgnoreError();
    }
  }
  void Send(const v1::AttachFrame& frame, const Shared& memory) DMUOND_REQUIRES(mutex_) {
    if (!wire::SendPacket(client_.get(), frame.SerializeAsString(), {memory.fd.get()}).ok()) {
      std::abort();
    }
  }
  wire::TimelinePage Page() DMUOND_REQUIRES(mutex_) { return wire::TimelinePage(page_->data); }
  std::span<float> Weights() DMUOND_REQUIRES(mutex_) {
    const Shared& arena = arenas_.at(kWeights);
    return {reinterpret_cast<float*>(arena.data), arena.size / sizeof(float)};
  }
  void Publish(uint64_t attempt) DMUOND_REQUIRES(mutex_) {
    std::ranges::fill(Weights(), static_cast<float>(step_));
    wire::Advance(Page().published(0, kBuckets), attempt);
  }
  void BeginEpochLocked() DMUOND_REQUIRES(mutex_) {
    attempt_ = ((attempt_ / kEpoch + 1) * kEpoch) + 2;
    if (!hold_publishing_) Publish(attempt_ - 1);
  }
  grpc::Status MustAcknowledge() DMUOND_REQUIRES(mutex_) {
    return Refusal(absl::StatusCode::kFailedPrecondition, "ROLLED_BACK",
                   absl::StrCat("the job went back to step ", *goes_back_to_),
                   {{"to_step", absl::StrCat(*goes_back_to_)},
                    {"epoch", absl::StrCat(back_epoch_)},
                    {"cause", asked_ ? "LOAD_SNAPSHOT" : "PEER_LOST"}});
  }

  wire::UniqueFd listener_;
  std::thread accepting_;
  std::unique_ptr<grpc::Server> server_;

  Mutex mutex_;
  wire::UniqueFd client_ DMUOND_GUARDED_BY(mutex_);
  std::map<uint32_t, Shared> arenas_ DMUOND_GUARDED_BY(mutex_);
  std::optional<Shared> page_ DMUOND_GUARDED_BY(mutex_);
  int64_t step_ DMUOND_GUARDED_BY(mutex_);
  std::string trainer_state_ DMUOND_GUARDED_BY(mutex_);
  bool has_state_ DMUOND_GUARDED_BY(mutex_);
  const int64_t published_timeout_ms_;
  const uint32_t version_;
  const int late_claims_;
  uint64_t attempt_ DMUOND_GUARDED_BY(mutex_);
  std::optional<int64_t> goes_back_to_ DMUOND_GUARDED_BY(mutex_);
  bool asked_ DMUOND_GUARDED_BY(mutex_) = true;
  std::vector<uint64_t> loads_ DMUOND_GUARDED_BY(mutex_);
  uint32_t back_epoch_ DMUOND_GUARDED_BY(mutex_) = 7;  // that begins with the next way back, about
  std::vector<v1::SubmitStepRequest> submits_ DMUOND_GUARDED_BY(mutex_);
  std::vector<int64_t> acknowledged_ DMUOND_GUARDED_BY(mutex_);
  std::vector<float> pushed_ DMUOND_GUARDED_BY(mutex_);
  int opens_ DMUOND_GUARDED_BY(mutex_) = 0;
  int closes_ DMUOND_GUARDED_BY(mutex_) = 0;
};

FakeDaemon::FakeDaemon(const std::string& path, State state)
    : impl_(std::make_unique<Impl>(path, std::move(state))) {}
FakeDaemon::~FakeDaemon() = default;
void FakeDaemon::Die() { impl_->Die(); }
void FakeDaemon::GoBackTo(int64_t step, const std::string& trainer_state, bool asked) {
  impl_->GoBackTo(step, trainer_state, asked);
}
void FakeDaemon::BeginEpoch() { impl_->BeginEpoch(); }
void FakeDaemon::AbortNextSubmit() { impl_->Set(&Impl::abort_submit_, true); }
void FakeDaemon::AbortNextPush() { impl_->Set(&Impl::abort_push_, true); }
void FakeDaemon::HoldPublishing(bool hold) { impl_->Set(&Impl::hold_publishing_, hold); }
void FakeDaemon::RefuseAsDraining() { impl_->Set(&Impl::draining_, true); }
std::vector<v1::SubmitStepRequest> FakeDaemon::submits() const { return impl_->submits(); }
std::vector<int64_t> FakeDaemon::acknowledged() const { return impl_->acknowledged(); }
std::vector<uint64_t> FakeDaemon::loads() const { return impl_->loads(); }
std::vector<float> FakeDaemon::pushed() const { return impl_->pushed(); }
int FakeDaemon::opens() const { return impl_->opens(); }
std::vector<float> FakeDaemon::gradients() const { return impl_->gradients(); }
int FakeDaemon::closes() const { return impl_->closes(); }

}  // namespace dmuond::testing
