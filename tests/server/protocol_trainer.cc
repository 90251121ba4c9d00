#include "tests/server/protocol_trainer.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "dmuond/v1/attach.pb.h"
#include "dmuond/wire/frame.h"
#include "dmuond/wire/timeline.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_memory.h"

namespace dmuond::testing {
namespace {

constexpr int64_t kRows = 8;
constexpr int64_t kColumns = 16;
constexpr int64_t kBytes = kRows * kColumns * static_cast<int64_t>(sizeof(float));

}  // namespace

ProtocolTrainer::ProtocolTrainer(const std::string& address)
    : socket_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
  sockaddr_un at{};
  at.sun_family = AF_UNIX;
  const std::string path = address + ".attach";
  std::strncpy(at.sun_path, path.c_str(), sizeof(at.sun_path) - 1);
  EXPECT_EQ(::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&at), sizeof(at)), 0);
  const auto packet = wire::ReceivePacket(socket_.get());
  v1::AttachFrame frame;
  EXPECT_TRUE(packet.ok() && frame.ParseFromString(packet->body));
  nonce_ = frame.welcome().nonce();
}

v1::OpenSessionRequest ProtocolTrainer::OpenRequest(int32_t rank, int32_t world) const {
  v1::OpenSessionRequest request;
  request.set_nonce(nonce_);
  request.set_job(job_);
  request.set_rank(rank);
  request.set_world_size(world);
  request.set_home_lane(-1);
  request.set_device_uuid(device_uuid_);
  request.set_client("raw trainer");
  return request;
}

v1::RegisterLayoutRequest ProtocolTrainer::LayoutRequest() const {
  v1::RegisterLayoutRequest request;
  *request.mutable_key() = key_;
  request.add_groups()->set_preset("torch");
  v1::Parameter& parameter = *request.add_parameters();
  parameter.set_name("matrix");
  parameter.set_weight_type(v1::ELEMENT_TYPE_FLOAT32);
  parameter.set_gradient_type(v1::ELEMENT_TYPE_FLOAT32);
  parameter.set_route(v1::ROUTE_MUON);
  parameter.set_reduce_factor(1);
  v1::Fragment& fragment = *request.add_fragments();
  fragment.set_contribution(v1::CONTRIBUTION_SUM);
  for (const int64_t extent : {kRows, kColumns}) {
    parameter.add_shape(extent);
    fragment.mutable_box()->add_begin(0);
    fragment.mutable_box()->add_end(extent);
  }
  uint32_t arena = 1;
  for (v1::Slice* slice : {fragment.mutable_gradient(), fragment.mutable_weight()}) {
    slice->set_arena(arena++);
    slice->add_strides(kColumns);
    slice->add_strides(1);
  }
  return request;
}

v1::AttachBuffersRequest ProtocolTrainer::AttachRequest() const {
  v1::AttachBuffersRequest request;
  *request.mutable_key() = key_;
  for (const uint32_t id : {1, 2}) {
    v1::Arena& arena = *request.add_arenas();
    arena.set_id(id);
    arena.set_size_bytes(kBytes);
    arena.mutable_daemon();
  }
  return request;
}

v1::SubmitStepRequest ProtocolTrainer::SubmitRequest(int64_t step) const {
  v1::SubmitStepRequest request;
  *request.mutable_key() = key_;
  request.set_step(step);
  request.set_attempt(attempt_);
  v1::GroupScalars& group = *request.mutable_scalars()->add_groups();
  group.set_learning_rate(0.01);
  group.set_momentum(0.95);
  request.set_wait_ms(20'000);
  return request;
}

absl::Status ProtocolTrainer::Open(int32_t rank, int32_t world) {
  v1::OpenSessionReply reply;
  absl::Status status = Call(OpenRequest(rank, world), &reply);
  key_.set_session(reply.session());
  key_.set_incarnation(reply.incarnation());
  key_.set_secret(reply.secret());
  return status;
}

absl::Status ProtocolTrainer::Register() {
  v1::RegisterLayoutReply reply;
  return Call(LayoutRequest(), &reply);
}

absl::Status ProtocolTrainer::Attach() {
  v1::AttachBuffersReply reply;
  absl::Status status = Call(AttachRequest(), &reply);
  if (!status.ok()) return status;
  attempt_ = reply.next_attempt();
  while (timeline_ == nullptr) {
    auto packet = wire::ReceivePacket(socket_.get());
    if (!packet.ok()) return packet.status();
    v1::AttachFrame frame;
    if (!frame.ParseFromString(packet->body) || packet->fds.size() != 1) {
      return absl::InternalError("a frame without a descriptor");
    }
    const int64_t bytes =
        frame.has_arena() ? frame.arena().size_bytes() : frame.timeline().size_bytes();
    auto mapping = kernels::cpu::MapShared(packet->fds[0].get(), static_cast<size_t>(bytes));
    if (!mapping.ok()) return mapping.status();
    if (frame.has_timeline()) {
      timeline_ = *std::move(mapping);
      continue;
    }
    arenas_[frame.arena().arena() - 1] = std::move(packet->fds[0]);
    (frame.arena().arena() == 1 ? gradient_ : weight_) = *std::move(mapping);
  }
  return absl::OkStatus();
}

absl::Status ProtocolTrainer::Push(int64_t step) {
  auto* weights = reinterpret_cast<float*>(weight_->data());
  for (int i = 0; i < kRows * kColumns; ++i) weights[i] = static_cast<float>(i % 7) - 3;
  v1::PushParametersRequest request;
  *request.mutable_key() = key_;
  request.set_step(step);
  request.set_all_weights(true);
  request.set_attempt(attempt_);
  v1::PushParametersReply reply;
  absl::Status status = Call(request, &reply);
  if (status.ok()) attempt_ = reply.next_attempt();
  return status;
}

absl::Status ProtocolTrainer::Submit(const v1::SubmitStepRequest& request,
                                     v1::SubmitStepReply* reply) {
  return Call(request, reply);
}

absl::Status ProtocolTrainer::Step(int64_t step) {
  auto* gradients = reinterpret_cast<float*>(gradient_->data());
  for (int i = 0; i < kRows * kColumns; ++i) {
    gradients[i] = static_cast<float>((i * 7 + step) % 11) - 5;
  }
  const wire::TimelinePage page(timeline_->data());
  wire::Advance(page.ready(0), attempt_);
  wire::Advance(page.submitted(), attempt_);
  v1::SubmitStepReply reply;
  absl::Status status = Submit(SubmitRequest(step), &reply);
  if (!status.ok()) return status;
  if (reply.outcome().kind() != v1::Outcome::KIND_COMMITTED || reply.outcome().step() != step) {
    return absl::InternalError(reply.outcome().ShortDebugString());
  }
  const uint64_t published = wire::WaitAtLeast(
      page.published(0, 1), attempt_, std::chrono::steady_clock::now() + std::chrono::seconds(20));
  attempt_ = reply.outcome().next_attempt();
  return published >= wire::kPoison ? absl::InternalError("poisoned") : absl::OkStatus();
}

absl::Status ProtocolTrainer::Close() {
  v1::CloseSessionRequest request;
  *request.mutable_key() = key_;
  v1::CloseSessionReply reply;
  return Call(request, &reply);
}

float* ProtocolTrainer::weights() const { return reinterpret_cast<float*>(weight_->data()); }

bool ProtocolTrainer::HasFrame() const {
  pollfd polled{socket_.get(), POLLIN, 0};
  return ::poll(&polled, 1, 50) > 0;
}

void ProtocolTrainer::Say(const std::string& bytes) const {
  // Refused where the daemon has closed it already.
  [[maybe_unused]] const ssize_t sent =
      ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

bool ProtocolTrainer::AttachSocketEnds() const {
  pollfd polled{socket_.get(), POLLRDHUP, 0};
  return ::poll(&polled, 1, 20'000) > 0;
}

}  // namespace dmuond::testing
