#include "tests/server/lane/harness.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <climits>
#include <csignal>

#include "dmuond/wire/frame.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/cpu_memory.h"
#include "scheduler/convert/convert.h"
#include "server/lane/gloo_group.h"
#include "server/lane/lane.h"
#include "server/shared/publish_board.h"
#include "tests/server/lane/late_device.h"

namespace dmuond::server::lane::testing {
namespace {

using std::chrono::steady_clock;

Held Hold(size_t bytes) {
  kernels::cpu::CpuMemoryHolder holder;
  bytes = std::max<size_t>(bytes, 64);
  Held held;
  auto fd = holder.Allocate(bytes, "test");
  EXPECT_TRUE(fd.ok()) << fd.status();
  held.fd = *std::move(fd);
  auto mapping = kernels::cpu::MapShared(held.fd.get(), bytes);
  EXPECT_TRUE(mapping.ok()) << mapping.status();
  held.mapping = *std::move(mapping);
  return held;
}

std::string PathOf(const std::string& program) {
  char path[PATH_MAX] = {};
  EXPECT_GT(::readlink("/proc/self/exe", path, sizeof(path) - 1), 0);
  std::string self(path);
  return self.substr(0, self.rfind('/')) + "/" + program;
}

}  // namespace

DeviceUnderTest& OtherDevice() {
  static DeviceUnderTest& device = *new DeviceUnderTest();
  return device;
}

Held Cluster::HoldOnDevice(size_t bytes, int32_t lane) const {
  return on_other_device() ? OtherDevice().allocate(std::max<size_t>(bytes, 64), lane)
                           : Hold(bytes);
}

Cluster::Cluster(const scheduler::testing::World& world, int32_t nodes, int32_t lanes_per_node,
                 Options options)
    : options_(std::move(options)) {
  // Makes the logger before lanes share it: a lane process has one thread, the harness several.
  spdlog::set_level(spdlog::level::warn);
  v1::PlanInputs wire;
  for (const scheduler::Registration& registration : world.registrations) {
    v1::Registration& to = *wire.add_registrations();
    to = ToProto(registration);
    to.set_world_size(world.trainers());
    to.set_bucket_bytes(options_.bucket_bytes);
    to.add_groups()->set_preset(options_.preset);
  }
  wire.set_nodes(nodes);
  wire.set_lanes_per_node(lanes_per_node);
  wire.set_landing_bytes_max(options_.landing_bytes_max);
  auto inputs = FromProto(wire);
  EXPECT_TRUE(inputs.ok()) << inputs.status();
  inputs_ = *std::move(inputs);
  for (size_t f = 0; f < inputs_.layout.fragments.size(); ++f) {
    fragments_.push_back(inputs_.layout.FragmentAt(f));
  }
  auto plan = scheduler::MakePlan(inputs_);
  EXPECT_TRUE(plan.ok()) << plan.status();
  plan_ = *std::move(plan);

  scalars.groups.push_back({.learning_rate = 0.02,
                            .weight_decay = 0.01,
                            .momentum = 0.95,
                            .beta1 = 0.9,
                            .beta2 = 0.95,
                            .eps = 1e-8});
  for (const scheduler::Trainer& trainer : inputs_.layout.trainers) {
    int64_t bytes = 0;
    for (const scheduler::Fragment& fragment : fragments_) {
      if (fragment.rank != trainer.rank) continue;
      bytes =
          std::max(bytes, fragment.gradient.offset_bytes + 4 * scheduler::Elements(fragment.box));
    }
    TrainerEnd end;
    end.node = trainer.node.value();
    const int32_t device = trainer.rank.value() % lanes_per_node;
    end.gradients = HoldOnDevice(bytes, device);
    end.weights = HoldOnDevice(bytes, device);
    trainers_.push_back(std::move(end));
  }
  const int32_t lanes = nodes * lanes_per_node;
  lanes_.resize(lanes);
  for (int32_t lane = 0; lane < lanes; ++lane) {
    LaneEnd& end = lanes_[lane];
    auto program = scheduler::MakeLaneProgram(inputs_, plan_, scheduler::LaneId(lane));
    EXPECT_TRUE(program.ok()) << program.status();
    end.program = *std::move(program);
    end.state = HoldOnDevice(end.program.state_bytes, lane);
    end.staging = HoldOnDevice(end.program.staging_bytes, lane);
    end.host_copy = storage::PlaceHostCopy(end.program);
    if (options_.host_copies) end.host_memory = Hold(end.host_copy.bytes());
    end.table = Hold(StateTableBytes(plan_.units.size()));
    if (lane % lanes_per_node == 0) {
      end.board = Hold(PublishBoardBytes(plan_.buckets, lanes_per_node));
    }
    StartLane(lane);
  }
  PumpUntil(
      [&] { return std::all_of(lanes_.begin(), lanes_.end(), [](auto& l) { return l.ready; }); });
  for (int32_t rank = 0; rank < world.trainers(); ++rank) Attach(rank);
}

Cluster::~Cluster() {
  for (LaneEnd& lane : lanes_) {
    v1::LaneCommand command;
    command.mutable_shutdown();
    wire::SendFrame(lane.socket.get(), command.SerializeAsString()).IgnoreError();
  }
  for (LaneEnd& lane : lanes_) {
    lane.socket.Reset();
    if (lane.thread.joinable()) lane.thread.join();
    if (lane.pid <= 0) continue;
    int status = 0;
    ::waitpid(lane.pid, &status, 0);
    EXPECT_FALSE(WIFSIGNALED(status)) << "a lane ended by signal " << WTERMSIG(status);
  }
}

void Cluster::StartLane(int32_t lane) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  LaneEnd& end = lanes_[lane];
  end.socket.Reset(ends[0]);
  end.ready = false;
  if (!on_other_device() && options_.run_as == RunAs::kLateThread) {
    end.thread = std::thread([fd = ends[1]] {
      LateDevice device;
      Lane(device, wire::UniqueFd(fd), MakeGlooGroup).Run().IgnoreError();
    });
  } else if (!on_other_device() && options_.run_as == RunAs::kThread) {
    end.thread = std::thread([fd = ends[1]] {
      auto device = kernels::cpu::CpuDevice::Create(1);
      ASSERT_TRUE(device.ok());
      Lane(**device, wire::UniqueFd(fd), MakeGlooGroup).Run().IgnoreError();
    });
  } else {
    const DeviceUnderTest& other = OtherDevice();
    const std::string program = PathOf(on_other_device() ? other.lane_program : "dmuond-lane");
    const std::string device = "--device=" + (on_other_device() ? other.flag(lane) : "cpu:1");
    end.pid = ::fork();
    if (end.pid == 0) {
      ::dup2(ends[1], 3);
      ::execl(program.c_str(), program.c_str(), "--fd=3", device.c_str(), "--log_level=warn",
              nullptr);
      ::_exit(127);
    }
    ::close(ends[1]);
  }
  SendConfigure(lane);
}

void Cluster::SendConfigure(int32_t lane) {
  LaneEnd& end = lanes_[lane];
  const int32_t per_node = inputs_.lanes_per_node;
  v1::LaneCommand command;
  v1::LaneCommand::Configure& configure = *command.mutable_configure();
  *configure.mutable_program() = ToProto(end.program);
  configure.set_epoch(1);
  configure.set_job("test");
  configure.add_groups()->set_preset(options_.preset);
  configure.set_state_bytes(end.program.state_bytes);
  configure.set_staging_bytes(end.program.staging_bytes);
  configure.set_state_table_bytes(static_cast<int64_t>(end.table.mapping->size()));
  configure.set_publish_board_bytes(
      static_cast<int64_t>(PublishBoardBytes(plan_.buckets, per_node)));
  configure.set_threads(1);
  std::vector<int> fds = {end.state.fd.get(), end.staging.fd.get(), end.table.fd.get(),
                          lanes_[lane / per_node * per_node].board.fd.get()};
  if (options_.host_copies) {
    configure.set_host_copy_bytes(end.host_copy.bytes());
    configure.set_snapshot_staging_bytes(options_.snapshot_staging_bytes);
    fds.push_back(end.host_memory.fd.get());
  }
  Send(lane, command, fds);
}

int Cluster::Shutdown(int32_t lane) {
  v1::LaneCommand command;
  command.mutable_shutdown();
  Send(lane, command);
  int status = 0;
  ::waitpid(lanes_[lane].pid, &status, 0);
  lanes_[lane].pid = -1;
  return status;
}

void Cluster::Restart(int32_t lane) {
  ::kill(lanes_[lane].pid, SIGKILL);
  ::waitpid(lanes_[lane].pid, nullptr, 0);
  StartLane(lane);
  PumpUntil([&] { return lanes_[lane].ready; });
  for (size_t rank = 0; rank < trainers_.size(); ++rank) Attach(static_cast<int32_t>(rank));
}

void Cluster::Send(int32_t lane, const v1::LaneCommand& command, const std::vector<int>& fds) {
  const absl::Status sent =
      wire::SendFrame(lanes_[lane].socket.get(), command.SerializeAsString(), fds);
  EXPECT_TRUE(sent.ok()) << sent;
}

void Cluster::Attach(int32_t rank) {
  TrainerEnd& trainer = trainers_[rank];
  const auto buckets = static_cast<uint32_t>(plan_.buckets);
  trainer.timeline = Hold(wire::TimelineBytes(buckets));
  ++trainer.incarnation;
  v1::LaneCommand command;
  v1::LaneCommand::AttachTrainer& attach = *command.mutable_attach();
  attach.set_rank(rank);
  attach.set_incarnation(trainer.incarnation);
  for (uint32_t id : {0, 1}) {
    v1::Arena& arena = *attach.add_arenas();
    arena.set_id(id);
    arena.set_size_bytes(static_cast<int64_t>(trainer.gradients.mapping->size()));
  }
  attach.set_buckets(buckets);
  attach.set_timeline_bytes(static_cast<int64_t>(wire::TimelineBytes(buckets)));
  attach.set_poison_parameters(options_.poison);
  const int64_t before = attached_;
  for (int32_t lane = 0; lane < lanes(); ++lane) {
    if (lane / inputs_.lanes_per_node != trainer.node) continue;
    Send(lane, command,
         {trainer.gradients.fd.get(), trainer.weights.fd.get(), trainer.timeline.fd.get()});
  }
  PumpUntil([&] { return attached_ == before + inputs_.lanes_per_node; });
}

void Cluster::Detach(int32_t rank) {
  v1::LaneCommand command;
  command.mutable_detach()->set_rank(rank);
  command.mutable_detach()->set_incarnation(trainers_[rank].incarnation);
  const int64_t before = detached_;
  for (int32_t lane = 0; lane < lanes(); ++lane) {
    if (lane / inputs_.lanes_per_node == trainers_[rank].node) Send(lane, command);
  }
  PumpUntil([&] { return detached_ == before + inputs_.lanes_per_node; });
}

void Cluster::Die(int32_t rank) {
  v1::LaneCommand command;
  command.mutable_trainer_gone()->set_rank(rank);
  command.mutable_trainer_gone()->set_incarnation(trainers_[rank].incarnation);
  for (int32_t lane = 0; lane < lanes(); ++lane) {
    if (lane / inputs_.lanes_per_node == trainers_[rank].node) Send(lane, command);
  }
}

void Cluster::SendCheck() {
  v1::LaneCommand command;
  for (const scheduler::Unit& unit : plan_.units) {
    v1::Extract& extract = *command.mutable_check()->add_extracts();
    extract.set_unit(unit.id.value());
    *extract.mutable_box() = *extract.add_held() = ToProto(unit.box);
  }
  checked.reset();
  Send(0, command);
}

void Cluster::Republish(uint64_t attempt, const std::vector<int32_t>& ranks) {
  v1::LaneCommand command;
  command.mutable_republish()->set_attempt(attempt);
  for (int32_t rank : ranks) command.mutable_republish()->add_ranks(rank);
  published.clear();
  std::set<int32_t> nodes;
  for (int32_t rank : ranks) nodes.insert(trainers_[rank].node);
  size_t expected = 0;
  for (int32_t lane = 0; lane < lanes(); ++lane) {
    if (!ranks.empty() && nodes.count(lane / inputs_.lanes_per_node) == 0) continue;
    Send(lane, command);
    ++expected;
  }
  PumpUntil([&] { return published.size() == expected; });
}

float* Cluster::Gradient(int32_t rank, const scheduler::Fragment& fragment) {
  return reinterpret_cast<float*>(trainers_[rank].gradients.mapping->data() +
                                  fragment.gradient.offset_bytes);
}
float* Cluster::Weight(int32_t rank, const scheduler::Fragment& fragment) {
  return reinterpret_cast<float*>(trainers_[rank].weights.mapping->data() +
                                  fragment.weight.offset_bytes);
}

void Cluster::ForEach(const scheduler::Fragment& fragment,
                      const std::function<void(int64_t, int64_t)>& visit) const {
  const scheduler::Extents& shape = inputs_.layout.parameters[fragment.parameter].shape;
  const scheduler::Extents strides = scheduler::RowMajorStrides(scheduler::ShapeOf(fragment.box));
  const int64_t elements = scheduler::Elements(fragment.box);
  for (int64_t local = 0; local < elements; ++local) {
    scheduler::Extents index(shape.size());
    int64_t rest = local;
    for (size_t d = 0; d < shape.size(); ++d) {
      index[d] = fragment.box.begin[d] + (rest / strides[d]);
      rest %= strides[d];
    }
    visit(local, scheduler::FlatIndex(shape, index));
  }
}

std::vector<float> Cluster::Weights(const std::string& parameter) {
  std::vector<float> whole;
  std::vector<bool> seen;
  for (const scheduler::Fragment& fragment : fragments_) {
    const scheduler::Parameter& p = inputs_.layout.parameters[fragment.parameter];
    if (p.name != parameter) continue;
    const auto elements = static_cast<size_t>(scheduler::Elements(scheduler::WholeBox(p.shape)));
    whole.resize(elements);
    seen.resize(elements);
    const float* data = Weight(fragment.rank.value(), fragment);
    ForEach(fragment, [&](int64_t local, int64_t flat) {
      if (seen[flat]) {
        EXPECT_EQ(std::bit_cast<uint32_t>(whole[flat]), std::bit_cast<uint32_t>(data[local]))
            << parameter << "[" << flat << "] differs at trainer " << fragment.rank.value();
      }
      whole[flat] = data[local];
      seen[flat] = true;
    });
  }
  return whole;
}

void Cluster::SignalReady(int32_t rank, int32_t bucket) {
  const wire::TimelinePage page(trainers_[rank].timeline.mapping->data());
  wire::Advance(page.ready(static_cast<uint32_t>(bucket)), attempt_);
}
void Cluster::SignalReady(int32_t rank) {
  for (int32_t b = 0; b < plan_.buckets; ++b) SignalReady(rank, b);
}

void Cluster::SendSubmission(int32_t rank, scheduler::AttemptKind kind,
                             const std::vector<int32_t>& absent) {
  kind_ = kind;
  scheduler::Submission submission;
  submission.rank = scheduler::TrainerRank(rank);
  submission.attempt = scheduler::Attempt(attempt_);
  submission.step = scheduler::StepId(step_ + 1);
  submission.kind = kind;
  submission.scalars = scalars;
  submission.absent = absent;
  for (int32_t p : absent) absent_.push_back({submission.rank, p});
  std::sort(absent_.begin(), absent_.end());
  v1::LaneCommand command;
  *command.mutable_submitted() = ToProto(submission);
  for (int32_t lane = 0; lane < lanes(); ++lane) {
    if (lane / inputs_.lanes_per_node == trainers_[rank].node) Send(lane, command);
  }
}

void Cluster::StoreSubmitted(int32_t rank) {
  const wire::TimelinePage page(trainers_[rank].timeline.mapping->data());
  wire::Advance(page.submitted(), attempt_);
}

void Cluster::SubmitFromHost(int32_t rank, const std::vector<int32_t>& absent) {
  SendSubmission(rank, scheduler::AttemptKind::kStep, absent);
}

void Cluster::Submit(int32_t rank, const std::vector<int32_t>& absent) {
  StoreSubmitted(rank);
  SubmitFromHost(rank, absent);
}

void Cluster::PushFrom(int32_t rank) { SendSubmission(rank, scheduler::AttemptKind::kPush, {}); }

uint64_t Cluster::Published(int32_t rank, int32_t bucket) const {
  const wire::TimelinePage page(trainers_[rank].timeline.mapping->data());
  return wire::Read(
      page.published(static_cast<uint32_t>(bucket), static_cast<uint32_t>(plan_.buckets)));
}

void Cluster::Open() {
  ++attempt_;
  absent_.clear();
  norms.clear();
  rail_ready_.clear();
  rail_done_.clear();
  v1::LaneCommand command;
  command.mutable_arm()->set_attempt(attempt_);
  command.mutable_arm()->set_step(step_ + 1);
  for (int32_t lane = 0; lane < lanes(); ++lane) {
    lanes_[lane].gathered = false;
    Send(lane, command);
  }
}

void Cluster::WaitGathered() {
  PumpUntil([&] {
    return std::all_of(lanes_.begin(), lanes_.end(), [](auto& lane) { return lane.gathered; });
  });
}

void Cluster::Decide(scheduler::Verdict verdict) {
  scheduler::Decision decision;
  decision.attempt = scheduler::Attempt(attempt_);
  decision.step = scheduler::StepId(step_ + 1);
  decision.kind = kind_;
  decision.verdict = verdict;
  decision.scalars = scalars;
  decision.clip_coefficient = clip_coefficient;
  decision.absent = absent_;
  v1::LaneCommand command;
  *command.mutable_decision() = ToProto(decision);
  published.clear();
  for (int32_t lane = 0; lane < lanes(); ++lane) Send(lane, command);
  const bool consumes =
      verdict == scheduler::Verdict::kCommit || verdict == scheduler::Verdict::kSkip;
  if (consumes && kind_ == scheduler::AttemptKind::kStep) ++step_;
}

void Cluster::WaitPublished() {
  PumpUntil([&] { return published.size() == lanes_.size(); });
}

void Cluster::Push() {
  Open();
  for (size_t rank = 0; rank < trainers_.size(); ++rank) PushFrom(static_cast<int32_t>(rank));
  WaitGathered();
  Decide(scheduler::Verdict::kCommit);
  WaitPublished();
}

void Cluster::Step(const std::map<int32_t, std::vector<int32_t>>& absent) {
  Open();
  for (size_t r = 0; r < trainers_.size(); ++r) {
    const auto rank = static_cast<int32_t>(r);
    const auto found = absent.find(rank);
    Submit(rank, found == absent.end() ? std::vector<int32_t>() : found->second);
    SignalReady(rank);
  }
  WaitGathered();
  Decide(scheduler::Verdict::kCommit);
  WaitPublished();
}

void Cluster::WaitUnitIo(int64_t request, std::string* error) {
  PumpUntil([&] { return unit_io_.count(request) != 0; });
  *error = unit_io_[request];
}

std::vector<int32_t> Cluster::WaitUpdated() {
  const auto updated = [&](scheduler::UnitId unit) {
    return State(unit.value()).step.value() == step_;
  };
  std::vector<int32_t> awaited;
  PumpUntil([&] {
    if (published.contains(0)) return true;
    if (pong_.has_value()) {
      awaited.assign(pong_->awaited_ranks().begin(), pong_->awaited_ranks().end());
      if (!awaited.empty() && std::ranges::all_of(plan_.units, updated, &scheduler::Unit::id)) {
        return true;
      }
      pong_.reset();
    }
    v1::LaneCommand command;
    command.mutable_ping();
    Send(0, command);
    return false;
  });
  return awaited;
}

void Cluster::WaitTurns(int32_t lane) {
  for (int turn = 0; turn < 8; ++turn) {
    pong_.reset();
    v1::LaneCommand command;
    command.mutable_ping();
    Send(lane, command);
    PumpUntil([&] { return pong_.has_value(); });
  }
}

StateView Cluster::State(int32_t unit) const {
  const int32_t owner = plan_.units[unit].owner.value();
  return ReadEntry(reinterpret_cast<const StateEntry*>(lanes_[owner].table.mapping->data())[unit]);
}

std::vector<float> Cluster::StateOf(scheduler::UnitId id) const {
  const scheduler::Unit& unit = plan_.units[id.value()];
  const LaneEnd& lane = lanes_[unit.owner.value()];
  std::vector<float> values;
  for (const scheduler::SlotClass& c : lane.program.slot_classes) {
    if (std::find(c.units.begin(), c.units.end(), id) == c.units.end()) continue;
    const std::byte* slot =
        lane.state.mapping->data() + c.offset_bytes + (State(id.value()).slot * c.slot_bytes);
    for (int32_t t = 0; t < c.tensors; ++t) {
      const auto* tensor = reinterpret_cast<const float*>(slot + (t * c.tensor_bytes));
      values.insert(values.end(), tensor, tensor + (unit.rows * unit.cols));
    }
  }
  return values;
}

void Cluster::PumpUntil(const std::function<bool()>& done) {
  const auto deadline = steady_clock::now() + std::chrono::seconds(30);
  while (!done()) {
    ASSERT_TRUE(failure.empty()) << failure;
    ASSERT_LT(steady_clock::now(), deadline) << "the lanes did not answer";
    std::vector<pollfd> polls;
    for (const LaneEnd& lane : lanes_) polls.push_back({lane.socket.get(), POLLIN, 0});
    ::poll(polls.data(), polls.size(), 100);
    for (size_t lane = 0; lane < lanes_.size(); ++lane) {
      if ((polls[lane].revents & (POLLIN | POLLHUP)) == 0) continue;
      auto frame = wire::ReceiveFrame(lanes_[lane].socket.get());
      ASSERT_TRUE(frame.ok()) << "lane " << lane << ": " << frame.status();
      v1::LaneReport report;
      ASSERT_TRUE(report.ParseFromString(frame->body));
      Handle(static_cast<int32_t>(lane), report);
    }
  }
}

void Cluster::Handle(int32_t lane, const v1::LaneReport& report) {
  using Report = v1::LaneReport;
  switch (report.report_case()) {
    case Report::kReady:
      lanes_[lane].ready = true;
      break;
    case Report::kRendezvous: {
      const v1::Rendezvous& rendezvous = report.rendezvous();
      auto& blobs = blobs_[rendezvous.rail()];
      blobs[rendezvous.node()] = rendezvous.blob();
      if (static_cast<int32_t>(blobs.size()) < inputs_.nodes) break;
      v1::LaneCommand command;
      v1::RendezvousComplete& complete = *command.mutable_rendezvous();
      complete.set_rail(rendezvous.rail());
      complete.set_epoch(1);
      for (const auto& [node, blob] : blobs) complete.add_blobs(blob);
      for (int32_t node = 0; node < inputs_.nodes; ++node) {
        Send((node * inputs_.lanes_per_node) + rendezvous.rail(), command);
      }
      break;
    }
    case Report::kAttached:
      EXPECT_EQ(report.attached().error(), "");
      ++attached_;
      break;
    case Report::kDetached:
      ++detached_;
      break;
    case Report::kRailReady:
      OnRailReady(lane / inputs_.lanes_per_node, report.rail_ready());
      break;
    case Report::kGathered: {
      EXPECT_EQ(report.gathered().attempt(), attempt_);
      lanes_[lane].gathered = true;
      const auto told = FromProto(report.gathered().norms());
      ASSERT_TRUE(told.ok()) << told.status();
      for (const scheduler::UnitNorm& norm : *told) norms[norm.unit.value()] = norm;
      break;
    }
    case Report::kPublished:
      published[lane] = report.published();
      break;
    case Report::kCopied:
      copied.push_back(report.copied());
      break;
    case Report::kChecked:
      checked = report.checked();
      copied_before_checked = static_cast<int>(copied.size());
      break;
    case Report::kStateLoaded:
      state_loaded = report.state_loaded();
      break;
    case Report::kUnitIo:
      unit_io_[report.unit_io().request()] = report.unit_io().error();
      break;
    case Report::kPong:
      pong_ = report.pong();
      break;
    case Report::kFailed:
      failure = report.failed().what();
      break;
    case Report::kBits:
      break;  // its daemon compares them
    default:
      ADD_FAILURE() << "unknown report";
  }
}

void Cluster::OnRailReady(int32_t node, const v1::RailReady& wire) {
  const scheduler::RailReady ready = *FromProto(wire);
  EXPECT_EQ(ready.attempt.value(), attempt_);
  const int32_t rail = ready.rail.value();
  const int operation = wire.operation();
  for (const scheduler::BucketRun& run : ready.buckets) {
    for (int32_t b = run.first.value(); b < run.end().value(); ++b) {
      rail_ready_[{rail, operation, b}].insert(node);
    }
  }
  // GO in the order of buckets, once all lanes with transfers have reported.
  const bool publish = ready.operation == scheduler::RailOperation::kPublish;
  auto& done = rail_done_[{rail, operation}];
  for (int32_t b = 0; b < plan_.buckets; ++b) {
    if (done.count(b) != 0) continue;
    std::set<int32_t> needed;
    for (int32_t n = 0; n < inputs_.nodes; ++n) {
      const scheduler::LaneProgram& p = lanes_[(n * inputs_.lanes_per_node) + rail].program;
      const bool push = kind_ == scheduler::AttemptKind::kPush;
      if (!(publish ? p.weights[b] : push ? p.adopts[b] : p.partials[b]).empty()) needed.insert(n);
    }
    if (needed.empty()) continue;
    const std::set<int32_t>& reported = rail_ready_[{rail, operation, b}];
    if (!std::includes(reported.begin(), reported.end(), needed.begin(), needed.end())) break;
    done.insert(b);
    scheduler::Go go;
    go.attempt = ready.attempt;
    go.rail = ready.rail;
    go.operation = ready.operation;
    if (!publish) go.kind = kind_;
    go.buckets = {{scheduler::BucketId(b), 1}};
    v1::LaneCommand command;
    *command.mutable_goes()->add_goes() = ToProto(go);
    for (const scheduler::AbsentFragment& absent : absent_) {
      if (plan_.parameter_bucket[absent.parameter] != b) continue;
      *command.mutable_goes()->add_absent() = ToProto(absent);
    }
    for (const int32_t n : needed) Send((n * inputs_.lanes_per_node) + rail, command);
  }
}

}  // namespace dmuond::server::lane::testing
