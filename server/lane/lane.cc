#include "server/lane/lane.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/status_macros.h"
#include "scheduler/convert/convert.h"
#include "server/common/log.h"
#include "server/lane/modules.h"

namespace dmuond::server::lane {
namespace {

using std::chrono::microseconds;

// How often words are looked at. One that comes right after another one is seen at once; one that
// comes later is seen late by at most a fiftieth of the time since, and by a millisecond. So a
// trainer that computes for a second costs a thousand looks or so.
// Where processors are few, each look takes one from somebody; a trainer's submission, a message,
// ends the pause anyway.
constexpr microseconds kShortPause{20};
constexpr microseconds kShortPauseOnFewCores{100};
constexpr microseconds kLongPause{1000};
constexpr int kPauseFraction = 50;
// Polls of a lane that waits for words, before its first sleep, where there are cores to spare. On
// a small machine they would take the processor from the trainer that is to write the word.
constexpr int kSpins = 100;
constexpr unsigned kCoresToSpin = 4;
constexpr std::chrono::milliseconds kSilentAfter{30'000};

}  // namespace

Lane::Lane(kernels::Device& device, wire::UniqueFd socket, PeerGroupFactory make_group,
           v1::LaneBits bits)
    : device_(device),
      channel_(std::move(socket)),
      make_group_(std::move(make_group)),
      bits_(std::move(bits)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      spins_(std::thread::hardware_concurrency() >= kCoresToSpin ? kSpins : 0) {}

absl::Status Lane::Run() {
  absl::Status status = Serve();
  // What the device still waits for ends before the process does: some drivers fail whoever shares
  // the device with a process that ended in the middle of a kernel.
  if (RailPolls()) LeaveRail();
  if (!status.ok() && !absl::IsUnavailable(status)) {
    v1::LaneReport report;
    report.mutable_failed()->set_what(status.ToString());
    channel_.Send(report).IgnoreError();  // the daemon may be gone as well
  }
  return status;
}

absl::Status Lane::Serve() {
  int idle_polls = 0;
  while (true) {
    RETURN_IF_ERROR(Drain());
    if (shutdown_) return absl::OkStatus();
    ASSIGN_OR_RETURN(bool progress, engine_ != nullptr ? engine_->Progress() : Connect());
    if (progress) {
      ++progress_;
      last_progress_ = Clock::now();
      idle_polls = 0;
      continue;
    }
    const bool polls =
        engine_ != nullptr && (engine_->watches_words() || engine_->device_busy() || RailPolls());
    if (polls && idle_polls++ < spins_) continue;
    RETURN_IF_ERROR(Wait());
  }
}

absl::Status Lane::Drain() {
  while (!shutdown_ && channel_.Readable()) {
    RETURN_IF_ERROR(channel_.Receive(command_, fds_));
    RETURN_IF_ERROR(Handle());
    last_progress_ = Clock::now();
  }
  return absl::OkStatus();
}

absl::Status Lane::Wait() {
  pollfd polled[2] = {{channel_.fd(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
  timespec timeout{};
  const bool busy = engine_ != nullptr && (engine_->device_busy() || RailPolls());
  const bool polls = busy || RailPolls() || (engine_ != nullptr && engine_->watches_words());
  if (polls) {
    const microseconds least = spins_ > 0 ? kShortPause : kShortPauseOnFewCores;
    const std::chrono::nanoseconds waited =
        busy ? Clock::duration(0) : Clock::now() - last_progress_;
    timeout.tv_nsec =
        std::clamp<std::chrono::nanoseconds>(waited / kPauseFraction, least, kLongPause).count();
  }
  // Errors of ppoll (EINTR) lead to the same next look as everything else.
  ::ppoll(polled, 2, polls ? &timeout : nullptr, nullptr);
  if ((polled[1].revents & POLLIN) != 0) {
    uint64_t count = 0;
    if (::read(wake_.get(), &count, sizeof(count)) < 0 && errno != EAGAIN) {
      return absl::InternalError("eventfd cannot be read");
    }
  }
  return absl::OkStatus();
}

absl::Status Lane::Handle() {
  using Command = v1::LaneCommand;
  const auto needs_engine = [&]() -> absl::Status {
    if (engine_ != nullptr) return absl::OkStatus();
    return absl::InternalError(
        absl::StrCat("command ", command_.command_case(), " before the lane was ready"));
  };
  switch (command_.command_case()) {
    case Command::kConfigure:
      return Configure(command_.configure());
    case Command::kRendezvous:
      return CompleteRendezvous(command_.rendezvous());
    case Command::kPing:
      return Answer(command_.ping());
    case Command::kRelease:
      return Release();
    case Command::kShutdown:
      shutdown_ = true;
      return absl::OkStatus();
    case Command::kLogLevel: {
      const absl::StatusOr<log::Level> level = log::ParseLevel(command_.log_level().level());
      if (level.ok()) log::SetLevel(*level);
      return level.status();
    }
    case Command::kTrace:
      // One that has yet to be configured has no steps to trace.
      if (engine_ != nullptr) engine_->OnTrace(command_.trace());
      return absl::OkStatus();
    default:
      break;
  }
  RETURN_IF_ERROR(needs_engine());
  switch (command_.command_case()) {
    case Command::kAttach:
      return engine_->OnAttach(command_.attach(), fds_);
    case Command::kDetach:
      return engine_->OnDetach(command_.detach());
    case Command::kTrainerGone:
      engine_->OnTrainerGone(command_.trainer_gone());
      return absl::OkStatus();
    case Command::kArm:
      return engine_->OnOpen(FromProto(command_.arm()));
    case Command::kSubmitted: {
      absl::StatusOr<scheduler::Submission> submission = FromProto(command_.submitted());
      return submission.ok() ? engine_->OnSubmitted(*submission) : submission.status();
    }
    case Command::kGoes:
      return OnGoes(command_.goes());
    case Command::kDecision: {
      absl::StatusOr<scheduler::Decision> decision = FromProto(command_.decision());
      return decision.ok() ? engine_->OnDecision(*std::move(decision)) : decision.status();
    }
    case Command::kReadUnit:
      return engine_->OnReadUnit(command_.read_unit(), fds_);
    case Command::kWriteUnit:
      return engine_->OnWriteUnit(command_.write_unit(), fds_);
    case Command::kCopyUpdate:
      return engine_->OnCopyUpdate(command_.copy_update(), fds_);
    case Command::kRepublish:
      return engine_->OnRepublish(command_.republish());
    case Command::kSnapshot:
      return engine_->OnSnapshot(command_.snapshot());
    case Command::kCheck:
      return engine_->OnCheck(command_.check());
    case Command::kLoadState:
      return engine_->OnLoadState(command_.load_state());
    default:
      return absl::InternalError("a command that this lane does not know");
  }
}

absl::Status Lane::OnGoes(const v1::Goes& goes) {
  for (const v1::Go& wire : goes.goes()) {
    ASSIGN_OR_RETURN(scheduler::Go go, FromProto(wire));
    for (const v1::AbsentFragment& absent : goes.absent()) go.absent.push_back(FromProto(absent));
    RETURN_IF_ERROR(engine_->OnGo(go));
  }
  return absl::OkStatus();
}

absl::Status Lane::Answer(const v1::LaneCommand::Ping& ping) {
  v1::LaneReport report;
  v1::LaneReport::Pong& pong = *report.mutable_pong();
  pong.set_number(ping.number());
  pong.set_progress(progress_);
  if (engine_ == nullptr) {
    pong.set_awaits_rail(group_ != nullptr);
  } else if (absl::Status status = engine_->Describe(pong); !status.ok()) {
    return status;
  }
  if (group_ != nullptr) pong.set_rail_silent_ms(LookAtRail().count());
  return channel_.Send(report);
}

std::chrono::milliseconds Lane::LookAtRail() {
  const PeerGroup::Silence silence = group_->silence();
  const bool silent = silence.lasts >= worth_telling_;
  if (silent && !rail_silent_) {
    log::Warn("the rail carries nothing, though it should", {{"job", job_->name},
                                                             {"epoch", job_->epoch},
                                                             {"silent_ms", silence.lasts.count()},
                                                             {"peers", silence.connections}});
  } else if (rail_silent_ && silence.lasts.count() == 0) {
    log::Info("the rail carries again", {{"job", job_->name}, {"epoch", job_->epoch}});
  }
  rail_silent_ = silent;
  return silent ? silence.lasts : std::chrono::milliseconds(0);
}

absl::Status Lane::Configure(const v1::LaneCommand::Configure& configure) {
  if (job_ != nullptr) return absl::InternalError("configured twice");
  ASSIGN_OR_RETURN(job_, LaneJob::Make(configure, fds_, device_));
  fault::FaultPoint("lane.configured");
  log::Info("lane configured", {{"job", job_->name},
                                {"epoch", job_->epoch},
                                {"units", job_->program.staged.size()},
                                {"batches", job_->program.batches.size()},
                                {"buckets", job_->buckets()},
                                {"program_bytes", configure.program().ByteSizeLong()}});
  const bool alone = job_->program.nodes == 1;
  if (!alone) {
    RETURN_IF_ERROR(MakeGroup(configure));
  }
  // All libraries are loaded by now. The daemon ends a lane that would compute other bits, before
  // lanes of other nodes are connected with it.
  RETURN_IF_ERROR(TellBits());
  if (alone) return Start();
  v1::LaneReport report;
  v1::Rendezvous& rendezvous = *report.mutable_rendezvous();
  rendezvous.set_rail(job_->program.rail.value());
  rendezvous.set_node(job_->program.node.value());
  rendezvous.set_epoch(job_->epoch);
  rendezvous.set_blob(group_->blob());
  return channel_.Send(report);
}

absl::Status Lane::TellBits() {
  v1::LaneReport report;
  *report.mutable_bits() = bits_;
  AddModules(*report.mutable_bits());
  return channel_.Send(report);
}

void Lane::LeaveRail() {
  if (RailPolls()) {
    log::Info("ends what its rail waits for", {{"job", job_->name}, {"epoch", job_->epoch}});
  }
  group_.reset();
}

// In the order in which they use each other. Streams end when their work is done, and do not say
// whether it was: who could not do other work, because its context has failed, ends.
absl::Status Lane::Release() {
  LeaveRail();
  rail_stream_.reset();
  engine_.reset();
  job_.reset();
  connecting_ = rail_silent_ = false;
  ASSIGN_OR_RETURN(std::unique_ptr<kernels::Stream> stream, device_.CreateStream());
  RETURN_IF_ERROR(stream->Synchronize());
  v1::LaneReport report;
  report.mutable_released();
  return channel_.Send(report);
}

absl::Status Lane::MakeGroup(const v1::LaneCommand::Configure& configure) {
  const std::chrono::milliseconds silence_max(configure.rail_timeout_ms());
  worth_telling_ = silence_max.count() > 0 ? std::min(kSilentAfter, silence_max / 2) : kSilentAfter;
  ASSIGN_OR_RETURN(rail_stream_, device_.CreateStream());
  ASSIGN_OR_RETURN(group_, make_group_({.rank = job_->program.node.value(),
                                        .size = job_->program.nodes,
                                        .bind_address = configure.bind_address(),
                                        .silence_max = silence_max,
                                        .device = &device_,
                                        .stream = rail_stream_.get(),
                                        .notify = [fd = wake_.get()] {
                                          const uint64_t one = 1;
                                          // A full counter wakes as well.
                                          [[maybe_unused]] const ssize_t n =
                                              ::write(fd, &one, sizeof(one));
                                        }}));
  return absl::OkStatus();
}

absl::Status Lane::CompleteRendezvous(const v1::RendezvousComplete& rendezvous) {
  if (group_ == nullptr || connecting_ || engine_ != nullptr) {
    return absl::InternalError("an unexpected rendezvous");
  }
  if (rendezvous.epoch() != job_->epoch || rendezvous.rail() != job_->program.rail.value()) {
    return absl::InternalError(absl::StrCat("rendezvous of rail ", rendezvous.rail(), ", epoch ",
                                            rendezvous.epoch(), " came to rail ",
                                            job_->program.rail.value(), ", epoch ", job_->epoch));
  }
  connecting_ = true;
  return group_->Connect({rendezvous.blobs().begin(), rendezvous.blobs().end()});
}

absl::StatusOr<bool> Lane::Connect() {
  if (!connecting_) return false;
  ASSIGN_OR_RETURN(bool ready, group_->Ready());
  if (!ready) return false;
  connecting_ = false;
  RETURN_IF_ERROR(Start());
  return true;
}

absl::Status Lane::Start() {
  ASSIGN_OR_RETURN(engine_, Engine::Create(*job_, channel_, device_, group_.get()));
  v1::LaneReport report;
  report.mutable_ready()->set_device(device_.Describe());
  report.mutable_ready()->set_tuning(device_.ops().Tuning());
  fault::FaultPoint("lane.ready");
  return channel_.Send(report);
}

}  // namespace dmuond::server::lane
