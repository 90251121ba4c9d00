// Messages of a coordinator to a member out of nowhere, and what other members ask of it: one of
// another build, or one that has gone mad, is refused or not heard, and the member lives and ends
// when it is told to.
//
// An input: flags (1: a trainer of this node opens a session; 2: there is a snapshot), then one
// thing after another: its kind, two bytes of length, and so many of its message. They come to node
// 1 of two, with a lane that does whatever it is told at once, and a trainer that steps whenever it
// can. A plan without registrations is that of the trainer's layout.
#include <signal.h>
#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "dmuond/v1/peer.pb.h"
#include "dmuond/wire/socket_path.h"
#include "scheduler/convert/convert.h"
#include "scheduler/plan.h"
#include "server/common/errors.h"
#include "server/common/log.h"
#include "server/daemon/calls/attach_server.h"
#include "server/daemon/daemon.h"
#include "server/daemon/group/directory_proof.h"
#include "server/daemon/memory/node_device.h"
#include "server/daemon/snapshots/node_snapshot.h"
#include "server/storage/posix_storage.h"
#include "tests/fuzz/reached.h"
#include "tests/server/daemon/in_process_trainer.h"
#include "tests/server/daemon/links_of_a_member.h"
#include "tests/server/daemon/support.h"
#include "tests/server/storage/snapshots.h"

namespace dmuond::server {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr uint32_t kEpoch = 1;
constexpr int32_t kNode = 1;
constexpr int32_t kNodes = 2;
constexpr int64_t kSavedStep = 3;
// What a member or its trainer says soon, if it has anything to say.
constexpr milliseconds kSoon{50};
constexpr milliseconds kLanesStart{2000};

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "fuzz: %s\n", what.c_str());
  std::abort();
}

Reached reached(100, {"plans", "reforms", "restores", "submissions", "commits", "acknowledged",
                      "saves", "manifests", "expelled", "reads", "writes"});

// Two matrices, each half of an arena, and of other shapes: one for each node's lane.
v1::RegisterLayoutRequest LayoutOf(const testing::ProtocolTrainer& trainer) {
  v1::RegisterLayoutRequest layout = trainer.LayoutRequest();
  const int64_t rows = layout.parameters(0).shape(0) / 2;
  const int64_t columns = layout.parameters(0).shape(1);
  layout.mutable_parameters(0)->set_shape(0, rows);
  layout.mutable_fragments(0)->mutable_box()->set_end(0, rows);
  v1::Parameter other = layout.parameters(0);
  v1::Fragment all_of_it = layout.fragments(0);
  other.set_name("other");
  all_of_it.set_parameter(1);
  for (const auto& [dimension, extent] : {std::pair(0, rows / 2), std::pair(1, columns * 2)}) {
    other.set_shape(dimension, extent);
    all_of_it.mutable_box()->set_end(dimension, extent);
  }
  for (v1::Slice* slice : {all_of_it.mutable_gradient(), all_of_it.mutable_weight()}) {
    slice->set_offset_bytes(rows * columns * static_cast<int64_t>(sizeof(float)));
    slice->set_strides(0, columns * 2);
  }
  *layout.add_parameters() = std::move(other);
  *layout.add_fragments() = std::move(all_of_it);
  return layout;
}

v1::PlanInputs PlanOf(const testing::ProtocolTrainer& trainer) {
  const v1::RegisterLayoutRequest layout = LayoutOf(trainer);
  v1::PlanInputs plan;
  plan.set_job(trainer.OpenRequest().job());
  plan.set_job_incarnation(1);
  plan.set_nodes(kNodes);
  plan.set_lanes_per_node(1);
  v1::Registration& registration = *plan.add_registrations();
  registration.set_node(kNode);
  registration.set_job(plan.job());
  registration.set_world_size(1);
  *registration.mutable_parameters() = layout.parameters();
  *registration.mutable_fragments() = layout.fragments();
  *registration.mutable_groups() = layout.groups();
  return plan;
}

// The snapshot directory that all inputs share, as each finds it.
class Disk {
 public:
  Disk() : storage_(*storage::OpenPosixStorage(folder_.path())) {}

  [[nodiscard]] storage::Storage* storage() { return storage_.get(); }
  // With the snapshot of one step, or with nothing.
  void Prepare(const storage::testing::Job& job, bool saved) {
    const std::filesystem::path all(folder_ / job.base.job());
    const auto newest = NewestOf(*storage_, job.base.job());
    const auto wanted = saved ? std::optional(storage::testing::IdAt(kSavedStep)) : std::nullopt;
    if (newest.ok() && *newest == wanted && Entries(all) <= (saved ? 1 : 0)) {
      return;
    }
    std::filesystem::remove_all(all);
    if (saved && !storage::testing::Save(*storage_, job, kSavedStep).ok()) Die("nothing is saved");
  }

 private:
  static size_t Entries(const std::filesystem::path& folder) {
    return std::filesystem::exists(folder) ? CountEntries(folder) : 0;
  }
  TempDir folder_;
  std::unique_ptr<storage::Storage> storage_;
};

// Steps from wherever the job is, whenever it can, until it is told to stop.
class SteppingTrainer {
 public:
  SteppingTrainer(Daemon& daemon, const std::string& address)
      : daemon_(daemon), trainer_(daemon, address, [this] { return stop_.load(); }) {
    thread_ = std::thread([this] { Run(); });
  }
  ~SteppingTrainer() { thread_.join(); }
  void Stop() { stop_ = true; }
  [[nodiscard]] bool runs() const { return runs_; }

 private:
  static constexpr int kFailuresMax = 20;  // of calls: then it gives up, as clients do

  void Run() {
    absl::Status status = Open();
    if (status.ok()) status = Register();
    if (status.ok()) status = trainer_.Attach();
    if (status.ok() && !daemon_.place(0).admin.Status().job().has_durable_step())
      (void)trainer_.Push();
    for (int failures = 0; status.ok() && !stop_ && failures < kFailuresMax;) {
      if (!Step()) ++failures;
    }
    if (status.ok() && !stop_) (void)trainer_.Close();
    runs_ = false;
  }
  absl::Status Open() {
    v1::OpenSessionRequest request = trainer_.OpenRequest();
    request.set_resume(v1::OpenSessionRequest::RESUME_IF_PRESENT);
    v1::OpenSessionReply reply;
    absl::Status status = trainer_.Call(request, &reply);
    trainer_.key().set_session(reply.session());
    trainer_.key().set_incarnation(reply.incarnation());
    trainer_.key().set_secret(reply.secret());
    return status;
  }
  absl::Status Register() {
    v1::RegisterLayoutReply reply;
    return trainer_.Call(LayoutOf(trainer_), &reply);
  }
  bool Step() {
    const v1::JobStatus job = daemon_.place(0).admin.Status().job();
    trainer_.set_attempt(job.attempt());
    v1::SubmitStepReply reply;
    const absl::Status status =
        trainer_.Submit(trainer_.SubmitRequest(job.last_committed_step() + 1), &reply);
    if (!status.ok()) return false;
    const v1::Outcome& outcome = reply.outcome();
    if (outcome.kind() == v1::Outcome::KIND_COMMITTED) ++reached["commits"];
    if (outcome.kind() != v1::Outcome::KIND_ROLLED_BACK) return true;
    v1::AckRollbackRequest request;
    *request.mutable_key() = trainer_.key();
    request.set_to_step(outcome.to_step());
    request.set_epoch(outcome.epoch());
    const bool acknowledged =
        daemon_.place(0).buffers.AckRollback(request, [this] { return stop_.load(); }).ok();
    if (acknowledged) ++reached["acknowledged"];
    return acknowledged;
  }

  Daemon& daemon_;
  std::atomic<bool> stop_ = false;
  std::atomic<bool> runs_ = true;
  InProcessTrainer trainer_;
  std::thread thread_;
};

class Member {
 public:
  Member(Disk& disk, const std::string& socket)
      : socket_(socket), storage_(disk.storage()), daemon_(Options(disk, socket), *device_) {
    auto attach =
        AttachServer::Start({.path = socket + wire::kAttachSuffix},
                            {.on_gone = [this](AttachId id) { daemon_.OnAttachGone(id); }});
    if (!attach.ok()) Die(attach.status().ToString());
    attach_ = *std::move(attach);
    daemon_.Bind(attach_.get(), &links_);
    daemon_.OnFormed(kEpoch);
  }
  ~Member() {
    if (trainer_ != nullptr) trainer_->Stop();
    daemon_.OnCoordinatorGone("the input has ended");  // wakes who waits
    if (!daemon_.place(0).admin.Leave(std::chrono::steady_clock::now() + std::chrono::seconds(2)))
      Die("the thread for disks is still at something");
    trainer_.reset();
    while (const auto told = links_.Take(milliseconds(0))) Count(*told);
    attach_.reset();
  }

  [[nodiscard]] Daemon& daemon() { return daemon_; }
  void StartTrainer() {
    trainer_ = std::make_unique<SteppingTrainer>(daemon_, socket_);
    (void)Await([](const v1::MemberMessage& told) { return told.has_registration(); },
                milliseconds(1000));
  }

  void Hear(const v1::CoordinatorMessage& message) {
    if (message.has_directory_proof()) {  // before it has joined
      (void)AnswerDirectory(storage_, kNode, message.directory_proof());
    }
    if (message.has_roll_back()) goes_back_ = true;
    daemon_.OnCoordinatorMessage(message);
    Settle(message);
  }
  void ReadState(const v1::ReadStateRequest& request) {
    const auto hangs_up = steady_clock::now() + 10 * kSoon;
    const auto read = daemon_.place(0).tensors.ReadStateForPeer(
        request, [&] { return steady_clock::now() >= hangs_up; });
    if (read.ok()) ++reached["reads"];
  }
  void WriteState(const v1::WriteStateRequest& request) {
    if (daemon_.place(0).tensors.WriteStateForPeer(request).ok()) ++reached["writes"];
  }
  void FormAnew() {
    daemon_.OnCoordinatorGone("the link is cut");
    daemon_.OnFormed(daemon_.newest_epoch() + 1);
  }
  void KillALane() {
    const v1::GetStatusReply status = daemon_.place(0).admin.Status();
    if (status.lanes().empty() || status.lanes(0).pid() == 0) return;
    ::kill(status.lanes(0).pid(), SIGKILL);
    (void)Await([](const v1::MemberMessage& told) { return told.has_lane_lost(); }, kLanesStart);
  }

 private:
  static DaemonOptions Options(Disk& disk, const std::string& socket) {
    DaemonOptions options;
    options.node = kNode;
    options.nodes = kNodes;
    options.lane_binary =
        LaneBinary(std::filesystem::read_symlink("/proc/self/exe").parent_path() / "willing_lane");
    options.socket = socket;
    options.job_memory_bytes = int64_t{64} << 20;
    options.coordinator.nodes = kNodes;
    options.coordinator.step.session_linger = std::chrono::minutes(1);
    options.storage = disk.storage();
    return options;
  }

  using Kind = std::function<bool(const v1::MemberMessage&)>;
  // Until the member says such a thing.
  bool Await(const Kind& kind, milliseconds patience) {
    const auto deadline = steady_clock::now() + patience;
    for (;;) {
      daemon_.Tick();
      if (const auto told = links_.Take(milliseconds(1))) {
        Count(*told);
        if (kind(*told)) return true;
      } else if (steady_clock::now() >= deadline) {
        return false;
      }
    }
  }
  // The job's memory is being made, or its lanes start.
  [[nodiscard]] bool Prepares() {
    const v1::GetStatusReply status = daemon_.place(0).admin.Status();
    if (status.lanes().empty()) return status.job().state() == "preparing";
    return std::any_of(status.lanes().begin(), status.lanes().end(),
                       [](const v1::LaneStatus& lane) { return lane.state() == "starting"; });
  }

  [[nodiscard]] bool TrainerIs(const std::string& state) {
    const v1::JobStatus job = daemon_.place(0).admin.Status().job();
    return !job.trainers().empty() && job.trainers(0).state() == state;
  }

  // What is heard next meets a member that has done what it was told.
  void Settle(const v1::CoordinatorMessage& message) {
    const auto ready = [](const v1::MemberMessage& told) { return told.has_plan_ready(); };
    if (message.has_plan() || message.has_reform() || message.has_roll_back()) {
      (void)Await(ready, Prepares() ? kLanesStart : milliseconds(0));
    } else if (message.has_save()) {
      (void)Await([](const v1::MemberMessage& told) { return told.has_snapshot_written(); }, kSoon);
    } else if (message.has_write_manifest()) {
      (void)Await([](const v1::MemberMessage& told) { return told.has_manifest_written(); }, kSoon);
    }
    if (trainer_ == nullptr || !trainer_->runs()) return;
    const auto trainer = [](const v1::MemberMessage& told) {
      return told.has_reports() || told.has_rank_attached() || told.has_rank_gone();
    };
    const bool begins = message.has_open() || message.has_republish() || message.has_roll_back();
    if (begins || message.has_decision() || message.has_expel()) (void)Await(trainer, kSoon);
    // One that has attached submits at once.
    if (message.has_open() && TrainerIs("attached")) {
      (void)Await([](const v1::MemberMessage& told) { return told.reports().submitted_size() > 0; },
                  10 * kSoon);
    }
  }

  void Count(const v1::MemberMessage& told) {
    if (told.has_plan_ready() && told.plan_ready().error().empty()) {
      ++(goes_back_                           ? reached["restores"]
         : told.plan_ready().epoch() > kEpoch ? reached["reforms"]
                                              : reached["plans"]);
    }
    reached["submissions"] += told.reports().submitted_size();
    reached["saves"] +=
        told.has_snapshot_written() && told.snapshot_written().error().empty() ? 1 : 0;
    reached["manifests"] +=
        told.has_manifest_written() && told.manifest_written().error().empty() ? 1 : 0;
    reached["expelled"] += told.has_rank_gone() && !told.rank_gone().closed() ? 1 : 0;
  }
  const std::string socket_;
  storage::Storage* const storage_;
  LinksOfAMember links_;
  const std::unique_ptr<NodeDevice> device_ = MakeCpuNodeDevice(/*threads=*/1);
  Daemon daemon_;
  std::unique_ptr<AttachServer> attach_;
  std::unique_ptr<SteppingTrainer> trainer_;
  bool goes_back_ = false;
};

class Target {
 public:
  Target() {
    log::SetLevel(log::Level::kError);
    Member member(disk_, socket_);
    const InProcessTrainer trainer(member.daemon(), socket_);
    plan_ = PlanOf(trainer);
    const auto inputs = FromProto(plan_);
    if (!inputs.ok()) Die(inputs.status().ToString());
    job_ = storage::testing::JobOf(plan_.job(), *inputs, plan_.registrations(0).groups());
    const auto units =
        std::count_if(job_.plan.units.begin(), job_.plan.units.end(),
                      [](const auto& unit) { return unit.owner == scheduler::LaneId(kNode); });
    if (units != 1) Die("the plan does not give each node's lane a matrix");
    ::setenv("WILLING_LANE_UNITS", std::to_string(units).c_str(), 1);
  }

  void Run(const std::string& input) {
    reached.NextInput();
    if (input.empty()) return;
    disk_.Prepare(job_, (input[0] & 2) != 0);
    Member member(disk_, socket_);
    if ((input[0] & 1) != 0) member.StartTrainer();
    for (size_t at = 1; at + 3 <= input.size();) {
      const size_t length =
          static_cast<uint8_t>(input[at + 1]) + (size_t{static_cast<uint8_t>(input[at + 2])} << 8);
      One(member, input[at], input.substr(at + 3, length));
      at += 3 + length;
    }
  }

 private:
  template <typename Message>
  static std::optional<Message> Parse(const std::string& body) {
    Message message;
    if (!message.ParseFromString(body)) return std::nullopt;
    return message;
  }
  void One(Member& member, uint8_t kind, const std::string& body) {
    switch (kind % 5) {
      case 0:
        if (auto message = Parse<v1::CoordinatorMessage>(body)) {
          if (message->has_plan()) GivePlan(*message->mutable_plan());
          if (message->has_roll_back()) GivePlan(*message->mutable_roll_back()->mutable_plan());
          member.Hear(*message);
        }
        return;
      case 1:
        if (const auto request = Parse<v1::ReadStateRequest>(body)) member.ReadState(*request);
        return;
      case 2:
        if (const auto request = Parse<v1::WriteStateRequest>(body)) member.WriteState(*request);
        return;
      case 3:
        return member.FormAnew();
      default:
        return member.KillALane();
    }
  }
  // Its registrations, where it has none of its own.
  void GivePlan(v1::PlanInputs& plan) const {
    if (!plan.registrations().empty()) return;
    std::optional<v1::SnapshotId> restore;
    if (plan.has_restore()) restore = plan.restore();
    plan = plan_;
    if (restore.has_value()) *plan.mutable_restore() = *restore;
  }

  const TempDir folder_;
  const std::string socket_ = folder_ / "d.sock";
  Disk disk_;
  v1::PlanInputs plan_;
  storage::testing::Job job_;
};

}  // namespace
}  // namespace dmuond::server

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static dmuond::server::Target target;
  target.Run(std::string(reinterpret_cast<const char*>(data), size));
  return 0;
}
