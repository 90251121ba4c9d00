#include "bench/recovery/group.h"

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "grpcpp/grpcpp.h"

namespace dmuond::bench {
namespace {

std::unique_ptr<v1::Admin::Stub> AdminOf(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, "localhost");
  return v1::Admin::NewStub(grpc::CreateCustomChannel(
      absl::StrCat("unix:", address, ".admin"), grpc::InsecureChannelCredentials(), arguments));
}

absl::Status ToStatus(const grpc::Status& status) {
  return status.ok() ? absl::OkStatus() : absl::UnavailableError(status.error_message());
}

}  // namespace

absl::StatusOr<std::unique_ptr<Group>> Group::Start(int nodes, const std::string& devices,
                                                    std::vector<std::string> flags) {
  std::unique_ptr<Group> group(new Group);
  group->directory_ = std::filesystem::temp_directory_path() / "dmuond-recovery-XXXXXX";
  if (::mkdtemp(group->directory_.data()) == nullptr) {
    return absl::InternalError(absl::StrCat("no directory ", group->directory_));
  }
  for (std::string& flag : flags) {
    if (flag == "--snapshot_dir") flag = "--snapshot_dir=" + group->directory_;
  }
  auto daemons = testing::StartGroup(nodes, devices, flags);
  if (!daemons.ok()) return daemons.status();
  group->daemons_ = *std::move(daemons);
  return group;
}

Group::~Group() {
  trainers_.clear();
  daemons_.clear();
  std::error_code ignored;
  std::filesystem::remove_all(directory_, ignored);
}

absl::Status Group::StartTrainer(TrainerOptions options) {
  options.address = daemons_[options.rank % daemons_.size()]->address();
  auto trainer = Trainer::Start(options, absl::StrCat(directory_, "/trainer", logs_++));
  if (!trainer.ok()) return trainer.status();
  if (trainers_.size() <= static_cast<size_t>(options.rank)) trainers_.resize(options.rank + 1);
  trainers_[options.rank] = std::make_unique<Trainer>(*std::move(trainer));
  return absl::OkStatus();
}

absl::StatusOr<v1::GetStatusReply> Group::Status(int node) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  v1::GetStatusReply reply;
  const absl::Status status = ToStatus(
      AdminOf(daemons_[node]->address())->GetStatus(&context, v1::GetStatusRequest(), &reply));
  if (!status.ok()) return status;
  return reply;
}

absl::StatusOr<int64_t> Group::Save(int node) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(10));
  v1::SaveJobReply reply;
  const absl::Status status =
      ToStatus(AdminOf(daemons_[node]->address())->SaveJob(&context, v1::SaveJobRequest(), &reply));
  if (!status.ok()) return status;
  return reply.step();
}

absl::Status Group::WaitDurable(int64_t step) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (std::chrono::steady_clock::now() < deadline) {
    const auto status = Status(0);
    if (status.ok() && status->job().has_durable_step() && status->job().durable_step() >= step) {
      return absl::OkStatus();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // between two looks
  }
  return absl::DeadlineExceededError(absl::StrCat("no snapshot of step ", step));
}

}  // namespace dmuond::bench
