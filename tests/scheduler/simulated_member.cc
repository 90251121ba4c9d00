#include "tests/scheduler/simulated_member.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "google/protobuf/util/field_comparator.h"
#include "google/protobuf/util/message_differencer.h"
#include "scheduler/convert/convert.h"
#include "scheduler/job/refusals.h"
#include "scheduler/reason.h"
#include "tests/scheduler/simulated_coordinator.h"
#include "tests/scheduler/simulated_trainer.h"

namespace dmuond::scheduler::testing {
namespace {

// Part of a hanging lane's silence is longer than the coordinator waits for a vote.
constexpr std::chrono::milliseconds kLaneTimeout{1'500};
constexpr std::chrono::milliseconds kWorkTimeout{4'000};

absl::Status Unavailable(const char* reason) {
  return WithReason(absl::UnavailableError(reason), reason);
}

// What a rank gives with a step; with a push it gives that of the step before.
std::string TrainerState(TrainerRank rank, StepId step) {
  return absl::StrCat("rank ", rank.value(), " at step ", step.value());
}

// What belongs to one attempt is repeated now and then, as after a reconnect.
int32_t ReplayPercent(const v1::MemberMessage& message) {
  return message.has_reports() || message.has_vote() ? 5 : 0;
}

// Empty: the records say the same. Most have the same bytes, which costs little to see.
std::string Differences(const JobRecord& a, const JobRecord& b) {
  std::string differs;
  if (a.SerializeAsString() == b.SerializeAsString()) return differs;
  google::protobuf::util::DefaultFieldComparator comparator;
  comparator.set_treat_nan_as_equal(true);
  google::protobuf::util::MessageDifferencer differencer;
  differencer.set_field_comparator(&comparator);
  differencer.ReportDifferencesToString(&differs);
  differencer.Compare(a, b);
  return differs;
}

}  // namespace

SimulatedMember::SimulatedMember(Simulation& simulation, NodeRank node,
                                 std::vector<TrainerRank> ranks)
    : simulation_(simulation),
      node_(node),
      ranks_(std::move(ranks)),
      reports_(/*gathers=*/simulation.world.inputs.nodes > 1) {
  for (int32_t rail = 0; rail < simulation.world.inputs.lanes_per_node; ++rail) {
    lanes_.emplace_back(simulation, *this, node, LaneIndex(rail));
  }
}

NodeJobOptions SimulatedMember::Options() const {
  NodeJobOptions options;
  options.node = node_.value();
  options.nodes = simulation_.world.inputs.nodes;
  options.lanes = simulation_.world.inputs.lanes_per_node;
  options.snapshots = simulation_.options.snapshot_every > 0;
  options.watch = {kLaneTimeout, kWorkTimeout};
  options.session_linger =
      simulation_.options.lingers ? simulation_.options.linger : std::chrono::milliseconds(0);
  return options;
}

Microseconds SimulatedMember::Soon(int64_t most_ms) {
  return simulation_.instant ? 0 : simulation_.chance.Pick(0, most_ms * kMillisecond);
}

// ---- the group ----

void SimulatedMember::Tell(v1::MemberMessage message) {
  Send(reports_.Pass(simulation_.Now(), std::move(message)));
}

void SimulatedMember::Send(OutgoingReports::Messages messages) {
  for (v1::MemberMessage& message : messages) {
    if (connection_ == nullptr) continue;  // nobody hears it
    if (simulation_.instant) {
      TellHere(message);
      continue;
    }
    const bool is_gone = message.has_rank_gone();
    const auto told = std::make_shared<const v1::MemberMessage>(std::move(message));
    const auto up = [this, told] {
      if (connection_ == nullptr) return;
      simulation_.network.Up(*connection_, ReplayPercent(*told), [this, told] { TellHere(*told); });
    };
    up();
    if (is_gone && simulation_.chance.Of(20)) {  // once more, when its successor may be known
      simulation_.time.After(simulation_.chance.Pick(0, 800 * kMillisecond),
                             [this, up, boot = boot_] {
                               if (boot_ == boot) up();
                             });
    }
  }
  simulation_.At(reports_.due(), [this, boot = boot_] {
    if (boot_ == boot) Send(reports_.OnDue(simulation_.Now()));
  });
}

void SimulatedMember::TellHere(const v1::MemberMessage& message) {
  simulation_.group.coordinator->Hear(node_, simulation_, message);
}

void SimulatedMember::Formed(Connection& connection, uint32_t epoch) {
  if (!job_) job_.emplace(Options());
  connection_ = &connection;
  reports_.Forget();
  Perform(job_->OnFormed(simulation_.Now(), epoch));
  // Others of this daemon's jobs have yet to be saved: this one may go on meanwhile.
  if (leaves_ && departure_.state() == Departure::State::kPrepared) BeginDeparture();
  Perform(departure_.OnFormed(*job_));
  if (to_end_.has_value()) EndJob();
}

void SimulatedMember::EndJob() {
  if (!alive_ || !job_ || !job_->exists()) return to_end_.reset();
  if (to_end_.value_or(job_->number()) != job_->number()) return to_end_.reset();
  to_end_ = job_->number();
  simulation_.Trace("node ", node_.value(), " is told to end the job");
  if (job_->phase() == NodeJob::Phase::kFailed) {
    return Perform(job_->EndHere(kEndedBySomebody, Unavailable(kJobEnded)));
  }
  Perform(job_->AskForEnd(kEndedBySomebody));
}

void SimulatedMember::Broken() {
  simulation_.Trace("node ", node_.value(), " sees the group broken");
  connection_ = nullptr;
  Perform(job_->OnBroken(simulation_.Now(), "a link is gone"));
  AdvanceDeparture();
}

void SimulatedMember::Hear(const std::shared_ptr<const v1::CoordinatorMessage>& message) {
  if (message->has_find_snapshot()) return FindNewest(message->find_snapshot().epoch());
  if (message->has_write_manifest()) return WriteManifest(message->write_manifest().manifest());
  if (message->has_discard()) return DiscardSnapshots(message->discard());
  if (message->has_decision()) {
    HearDecision(*message);
  } else {
    const StepMember* steps = job_->exists() ? job_->steps() : nullptr;
    const Attempt before = steps == nullptr ? Attempt(0) : steps->open().attempt;
    if (message->has_open() && job_->exists() && job_->plan() != nullptr) {
      reports_.OnOpen(simulation_.Now(), FromProto(message->open()));
    }
    Perform(job_->OnMessage(simulation_.Now(), *message));
    steps = job_->exists() ? job_->steps() : nullptr;
    if (steps != nullptr && steps->open().attempt < before) {
      simulation_.Fail("a member went back to an older attempt");
    }
  }
  if (message->has_roll_back()) {
    for (const TrainerRank rank : ranks_) {
      const auto client = clients_.find(rank);
      if (client == clients_.end()) continue;
      const auto back = MustAcknowledge(rank, client->second.incarnation);
      if (back) simulation_.trainers[rank.value()]->JobWentBack(*back);
    }
  }
  AdvanceDeparture();
}

void SimulatedMember::HearDecision(const v1::CoordinatorMessage& message) {
  const Decision decision = *FromProto(message.decision());
  const StepMember* steps = job_->exists() ? job_->steps() : nullptr;
  const bool news = steps != nullptr && decision.attempt >= steps->open().attempt;
  Perform(job_->OnMessage(simulation_.Now(), message));
  if (!news) return;
  steps = job_->steps();
  if (steps->last_decision()->attempt != decision.attempt) {
    simulation_.Fail("a decision was not heard");
  }
  if (decision.verdict != Verdict::kCommit && decision.verdict != Verdict::kSkip) return;
  history_ = simulation_.invariants.Heard(absl::StrCat("the member of node ", node_.value()),
                                          history_, decision.attempt);
  if (decision.outcome.durable_step) {
    simulation_.invariants.ToldDurable(decision.attempt, *decision.outcome.durable_step,
                                       steps->last_committed());
  }
}

void SimulatedMember::Tick() {
  if (!alive_ || !job_) return;
  NodeJob::Sight sight;
  sight.lanes_end = lanes_end_;
  sight.processor_time = [this](LaneIndex rail) -> std::optional<std::chrono::milliseconds> {
    const SimulatedLane& lane = lanes_[rail.value()];
    if (lane.dead()) return std::nullopt;
    return std::chrono::milliseconds(lane.hangs() ? 0 : simulation_.time.now() / kMillisecond);
  };
  Perform(job_->OnTick(simulation_.Now(), sight));
  if (!lanes_end_) Perform(job_->OnPlacesFree());
  AdvanceDeparture();
}

bool SimulatedMember::Settled() const {
  if (!alive_ || !job_) return true;
  switch (job_->phase()) {
    case NodeJob::Phase::kNone:
    case NodeJob::Phase::kRegistering:
    case NodeJob::Phase::kFailed:
      return true;
    case NodeJob::Phase::kRunning:
      return std::none_of(lanes_.begin(), lanes_.end(), [](const SimulatedLane& lane) {
        return lane.hangs() || lane.dead() || lane.publishing();
      });
    default:
      return false;
  }
}

// ---- the record ----

void SimulatedMember::WriteRecord() {
  if (!simulation_.RecordsJobs() || record_version_ == job_->record_version()) return;
  record_version_ = job_->record_version();
  std::map<RecordPart, std::string> record;
  for (const RecordPart& part : job_->RecordParts()) {
    const auto written = record_.find(part);
    if (written != record_.end()) {
      record.insert(record_.extract(written));
      continue;
    }
    JobRecord alone;
    job_->WritePart(part, alone);
    record.emplace(part, alone.SerializeAsString());
  }
  record_ = std::move(record);
}

JobRecord SimulatedMember::WholeRecord() const {
  JobRecord record;
  for (const RecordPart& part : job_->RecordParts()) job_->WritePart(part, record);
  return record;
}

void SimulatedMember::HandOver() {
  if (!alive_ || !job_) return;
  ++simulation_.counts.hand_overs;
  simulation_.Trace("node ", node_.value(), " goes on from its record");
  std::string bytes;
  for (const auto& [part, written] : record_) bytes += written;
  const absl::StatusOr<JobRecord> record = ParseJobRecord(bytes);
  if (!record.ok()) return simulation_.Fail(std::string(record.status().message()));
  if (const std::string differs = Differences(*record, WholeRecord()); !differs.empty()) {
    return simulation_.Fail("the record does not say what there is: " + differs);
  }
  absl::StatusOr<NodeJob> successor = NodeJob::FromRecord(
      Options(), *record, record->progress().prepared() ? simulation_.world.planned : PlannedJob{},
      simulation_.Now());
  if (!successor.ok()) return simulation_.Fail(std::string(successor.status().message()));
  job_.emplace(*std::move(successor));
  job_->SetDiskHangs(disk_hangs_);
  if (const std::string differs = Differences(*record, WholeRecord()); !differs.empty()) {
    return simulation_.Fail("a record was read as another one: " + differs);
  }
  record_.clear();
  record_version_.reset();
  WriteRecord();
}

// ---- performing ----

void SimulatedMember::Perform(node::Actions actions) {
  WriteRecord();
  if (simulation_.HandsOver() && simulation_.hand_overs.Of(2)) {
    const Microseconds soon =
        simulation_.hand_overs.Of(70) ? 0 : simulation_.hand_overs.Pick(0, 20 * kMillisecond);
    simulation_.time.After(soon, [this, boot = boot_] {
      if (boot_ == boot) HandOver();
    });
  }
  // Another job, or none, has no past here.
  if (std::exchange(job_number_, job_->number()) != job_->number()) history_ = {};
  for (node::Action& action : actions) {
    std::visit([this](auto& order) { Do(order); }, action);
  }
}

void SimulatedMember::Do(const node::Note& order) {
  if (!simulation_.group.traced) return;
  std::string line = absl::StrCat("node ", node_.value(), ": ", order.message);
  for (const node::Note::Field& field : order.fields) {
    absl::StrAppend(&line, " ", field.key, "=", field.value);
  }
  simulation_.Trace(line);
}

void SimulatedMember::Do(const node::CommandLanes& order) {
  // The answer to this submission lets a trainer signal buckets whose gradients are absent.
  if (order.may_wait && order.command.submitted().absent_size() > 0) {
    simulation_.Fail("lanes may hear of absent gradients after the trainer is answered");
  }
  for (const LaneIndex rail : order.lanes) lanes_[rail.value()].Told(order.command);
}

void SimulatedMember::Do(const node::StartLanes& order) {
  if (order.state_is_void) {
    for (SimulatedLane& lane : lanes_) lane.ForgetMemory();
  }
  const bool lacks = order.anew && simulation_.chance.Of(5);
  if (!lacks) {
    for (SimulatedLane& lane : lanes_) lane.Renew(order.epoch);
  }
  Perform(job_->OnLanesStarted(
      simulation_.Now(), lacks ? absl::ResourceExhaustedError("no memory") : absl::OkStatus()));
  if (lacks) return;
  // A library was replaced for a moment: one lane has loaded the other build.
  const bool replaced = order.anew && simulation_.chance.Of(5);
  const auto other = replaced ? simulation_.chance.Pick(0, static_cast<int64_t>(lanes_.size()) - 1)
                              : static_cast<int64_t>(lanes_.size());
  for (size_t rail = 0; rail < lanes_.size(); ++rail) {
    const bool differs = static_cast<int64_t>(rail) == other;
    if (differs) ++simulation_.counts.other_bits;
    lanes_[rail].Begin(Soon(200), differs ? "another build" : "the build");
  }
  if (simulation_.time.now() >= simulation_.group.lanes_fail_until) return;
  simulation_.time.After(Soon(100), [this, epoch = order.epoch, boot = boot_] {
    if (boot_ == boot && job_->exists() && job_->epoch() == epoch) LaneDies(LaneIndex(0));
  });
}

void SimulatedMember::Do(const node::EndLanes& /*order*/) {
  for (SimulatedLane& lane : lanes_) lane.End();
  lanes_end_ = true;
  simulation_.time.After(Soon(100), [this, ending = ++endings_] {
    if (endings_ == ending) lanes_end_ = false;
  });
}

void SimulatedMember::Do(const node::CondemnLane& order) {
  simulation_.Trace("a lane of node ", node_.value(), " is killed: ", order.why);
  lanes_[order.lane.value()].Die();
}

void SimulatedMember::Do(const node::Prepare& order) {
  const auto done = [this, number = ++prepares_, restores = order.inputs.has_restore()] {
    if (prepares_ != number) return;
    if (restores && simulation_.chance.Of(20)) {
      simulation_.Trace("memory lacks on node ", node_.value());
      ++simulation_.counts.lacking_memory;
      return Perform(
          job_->OnPrepared(simulation_.Now(), absl::ResourceExhaustedError("memory lacks")));
    }
    for (SimulatedLane& lane : lanes_) lane.ForgetMemory();
    published_ = 0;
    const auto first = simulation_.world.programs.begin() +
                       static_cast<std::ptrdiff_t>(node_.value() * lanes_.size());
    reports_.OnPlan({first, first + static_cast<std::ptrdiff_t>(lanes_.size())},
                    static_cast<int32_t>(ranks_.size()));
    Perform(job_->OnPrepared(
        simulation_.Now(),
        NodeJob::Prepared{simulation_.world.planned, simulation_.options.snapshot_every > 0}));
  };
  if (simulation_.instant) return done();
  simulation_.time.After(Soon(simulation_.chance.Of(80) ? 20 : 2'000), done);
}

void SimulatedMember::Do(const node::DropMemory& /*order*/) {
  ++prepares_;
  RaisePublished(wire::kPoison);
}

void SimulatedMember::Do(const node::SessionEnded& order) {
  for (auto client = clients_.begin(); client != clients_.end(); ++client) {
    if (client->second.id != order.id) continue;
    const TrainerRank rank = client->first;
    if (order.told.has_value()) {
      // A launcher starts again what people have ended, too.
      const bool ended = order.told->ok() || ReasonOf(*order.told) == kJobEnded;
      ended_[rank] = {client->second.incarnation, ended ? Unavailable("JOB_ENDED") : *order.told};
    }
    clients_.erase(client);
    // It was expelled.
    if (!order.told.has_value() && leaving_ != rank)
      simulation_.trainers[rank.value()]->Die("it hangs");
    return;
  }
}

// ---- lanes ----

void SimulatedMember::Reported(LaneIndex rail, const v1::LaneReport& report) {
  if (!alive_ || !job_) return;
  Perform(job_->OnLaneReport(simulation_.Now(), rail, report));
  AdvanceDeparture();
}

void SimulatedMember::LaneGone(LaneIndex rail) {
  if (!alive_ || !job_) return;
  Perform(job_->OnLaneGone(simulation_.Now(), rail, "it died"));
  AdvanceDeparture();
}

void SimulatedMember::LaneDies(LaneIndex rail) {
  SimulatedLane& lane = lanes_[rail.value()];
  if (!alive_ || lane.dead()) return;
  ++simulation_.counts.lane_deaths;
  simulation_.Trace("a lane of node ", node_.value(), " dies");
  lane.Die();
}

void SimulatedMember::LaneHangs(LaneIndex rail) {
  SimulatedLane& lane = lanes_[rail.value()];
  if (!alive_ || lane.dead() || lane.hangs()) return;
  ++simulation_.counts.lane_hangs;
  simulation_.Trace("a lane of node ", node_.value(), " hangs");
  lane.Hang();
}

void SimulatedMember::ProgressLanes() {
  for (SimulatedLane& lane : lanes_) {
    simulation_.time.After(simulation_.chance.Pick(0, 500), [&lane] { lane.Progress(); });
  }
}

void SimulatedMember::OnPublished() {
  Attempt everywhere = lanes_.front().published();
  for (const SimulatedLane& lane : lanes_) everywhere = std::min(everywhere, lane.published());
  RaisePublished(everywhere.value());
}

// ---- death ----

void SimulatedMember::Die() {
  simulation_.Trace("the daemon of node ", node_.value(), " dies");
  alive_ = false;
  ++boot_;
  leaves_ = nullptr;
  connection_ = nullptr;
  job_.emplace(Options());
  record_.clear();
  record_version_.reset();
  disk_hangs_.clear();
  to_end_.reset();
  departure_ = {};
  looks_ = false;
  seen_.reset();
  reports_.Forget();
  history_ = {};
  ended_.clear();
  copies_.reset();
  committing_.reset();
  ++prepares_;
  ++restores_;
  ++endings_;
  lanes_end_ = false;
  for (SimulatedLane& lane : lanes_) {
    lane.End();
    lane.ForgetMemory();
  }
  clients_.clear();
  for (TrainerRank rank : ranks_) simulation_.trainers[rank.value()]->DaemonDied();
}

void SimulatedMember::Start() { alive_ = true; }

// ---- sessions ----

SimulatedMember::Client* SimulatedMember::Find(TrainerRank rank, uint64_t incarnation) {
  const auto found = clients_.find(rank);
  if (found == clients_.end() || found->second.incarnation != incarnation) return nullptr;
  return &found->second;
}

absl::Status SimulatedMember::NoSession(TrainerRank rank, uint64_t incarnation) const {
  const auto ended = ended_.find(rank);
  if (ended != ended_.end() && ended->second.first == incarnation) return ended->second.second;
  return WithReason(absl::FailedPreconditionError("no such session here"), "INCARNATION_OLD");
}

void SimulatedMember::BeginRegistered(TrainerRank rank) {
  if (!Open(rank, v1::OpenSessionRequest::RESUME_IF_PRESENT)->ok())
    simulation_.Fail("a rank cannot begin");
}

void SimulatedMember::BeginAttached(TrainerRank rank) {
  const auto attached = Attach(rank, clients_.at(rank).incarnation);
  if (!attached || !attached->ok()) simulation_.Fail("a rank cannot attach as the job begins");
}

SimulatedMember::Later<SimulatedMember::OpenedSession> SimulatedMember::Open(
    TrainerRank rank, v1::OpenSessionRequest::Resume how) {
  if (!alive_ || !job_ || leaves_ || clients_.contains(rank)) return std::nullopt;
  NodeJob::Opening opening;
  opening.id = ++sessions_;
  opening.end_is_seen = opening.id % 3 != 0;
  opening.rank = rank.value();
  opening.world_size = static_cast<int32_t>(simulation_.world.registrations.size());
  opening.job = simulation_.name();
  opening.resume = how;
  if (how == v1::OpenSessionRequest::RESUME_DISCARD) {
    opening.launch = absl::StrCat("launch ", simulation_.launches);
  }
  node::Actions actions;
  std::optional<std::optional<ResumePoint>> resume;
  NodeJob::OpenAnswer answer = job_->Open(simulation_.Now(), opening, resume, actions);
  std::optional<SnapshotId> newest;
  if (std::holds_alternative<NodeJob::NeedsResume>(answer)) {
    if (simulation_.chance.Of(50)) AnotherGroupSaves();
    // Who discards looks only whose snapshots there are.
    if (how != v1::OpenSessionRequest::RESUME_DISCARD) newest = Newest();
    resume.emplace();
    if (newest) {
      resume->emplace();
      (*resume)->manifest.set_step(newest->step.value());
      (*resume)->manifest.set_attempt(newest->attempt.value());
    }
    answer = job_->Open(simulation_.Now(), opening, resume, actions);
  }
  if (std::holds_alternative<NodeJob::Later>(answer)) return std::nullopt;
  if (const auto* refused = std::get_if<absl::Status>(&answer)) return *refused;
  if (std::holds_alternative<NodeJob::MustDiscard>(answer)) {
    if (job_->ranks().empty()) Perform(job_->Discard(opening));
    return std::nullopt;
  }
  const auto* opened = std::get_if<NodeJob::Opened>(&answer);
  if (opened == nullptr) {
    simulation_.Fail("a session that asks again is told to look for a snapshot");
    return std::nullopt;
  }
  if (std::exchange(job_number_, job_->number()) != job_->number()) history_ = {};
  for (const SimulatedLane& lane : lanes_) {
    if (lane.HasOwnMemoryOf(rank)) simulation_.Fail("a rank comes again before its memory goes");
  }
  // What a snapshot has of it, simulated disks do not keep.
  if (!opened->trainer_state.empty() &&
      opened->trainer_state != TrainerState(rank, StepId(opened->last_committed))) {
    simulation_.Fail("a rank is given another state than that of the last step");
  }
  OpenedSession session;
  session.incarnation = opened->incarnation;
  if (job_->steps() != nullptr || (job_->wire().has_restore() && !job_->restores())) {
    session.at = history_;
  } else if (job_->resume().has_value()) {
    session.at = simulation_.invariants.StateOf(
        {Attempt(job_->resume()->manifest.attempt()), StepId(job_->resume()->step())});
  }
  Client& client = clients_[rank];
  client = {};
  client.id = opening.id;
  client.incarnation = opened->incarnation;
  client.told = session.at.step;
  Perform(std::move(actions));
  if (Client* now = Find(rank, session.incarnation); now != nullptr) {
    const v1::Registration& registration = simulation_.world.registrations[rank.value()];
    Perform(job_->Register(now->id, registration,
                           std::make_shared<const Registration>(*FromProto(registration))));
  }
  return session;
}

SimulatedMember::Later<Attempt> SimulatedMember::Attach(TrainerRank rank, uint64_t incarnation) {
  Client* client = Find(rank, incarnation);
  if (client == nullptr) return NoSession(rank, incarnation);
  const RankTable::Session& session = SessionOf(*client);
  if (session.refusals > 0) return Unavailable("NODE_NOT_READY");
  if (!job_->failure().ok()) return job_->failure();
  if (!client->attached) {
    if (absl::Status over = job_->WhyNoLanesCome(); !over.ok()) return over;
  }
  if (!client->mapping) {
    if (job_->plan() == nullptr || job_->WhyNotYetMapped(client->id)) return std::nullopt;
    if (!job_->Published()) return std::nullopt;
    client->mapping = true;
    v1::LaneCommand command;
    command.mutable_attach()->set_rank(rank.value());
    command.mutable_attach()->set_incarnation(incarnation);
    // For its own process alone: memory of that, of every other session, and the daemon's where
    // nobody sees its end.
    if ((incarnation + rank.value()) % 2 == 0) {
      command.mutable_attach()->add_arenas()->mutable_cuda_ipc();
    } else if (!job_->ranks().Find(client->id)->end_is_seen) {
      command.mutable_attach()->add_arenas()->mutable_daemon();
    }
    Perform(job_->BeginMapping(client->id, std::move(command)));
  }
  if (!client->attached) {
    if (!job_->AllMapped(client->id)) return std::nullopt;
    client->begins = job_->begins_from_snapshot();
    client->attached = true;
    Perform(job_->Attach(client->id, {}, /*broadcast=*/false));
    client = Find(rank, incarnation);
    if (client == nullptr) return NoSession(rank, incarnation);
  }
  if (client->begins) {
    if (!job_->Restarted()) return std::nullopt;
    Perform(job_->PublishSince(client->id, job_->applied_attempt()));
  }
  // It has been told of another step than the job's: its client begins again.
  if (client->told != history_.step) return Unavailable("GROUP_NOT_READY");
  job_->TellAttached(client->id);
  WriteRecord();
  return job_->steps()->open().attempt;
}

absl::StatusOr<StepAnswer> SimulatedMember::Step(const Submission& request, uint64_t incarnation,
                                                 bool wait) {
  const Client* client = Find(request.rank, incarnation);
  if (client == nullptr) return NoSession(request.rank, incarnation);
  if (wait) return job_->AnswerOf(client->id, request.step, request.attempt);
  node::Actions actions;
  const std::string state = TrainerState(request.rank, request.step);
  absl::StatusOr<StepAnswer> answer = job_->Submit(client->id, request, state, actions);
  Perform(std::move(actions));
  if (!answer.ok()) return answer;
  if (answer->pending()) {
    return job_->failure().ok() ? answer : absl::StatusOr<StepAnswer>(job_->failure());
  }
  ++simulation_.counts.repeated_answers;
  return answer;
}

std::optional<WayBack> SimulatedMember::MustAcknowledge(TrainerRank rank,
                                                        uint64_t incarnation) const {
  const auto found = clients_.find(rank);
  if (found == clients_.end() || found->second.incarnation != incarnation) return std::nullopt;
  const auto& back = SessionOf(found->second).must_acknowledge;
  if (!back) return std::nullopt;
  return WayBack{StepId(back->to_step), GroupEpoch(back->epoch)};
}

SimulatedMember::Later<Attempt> SimulatedMember::Acknowledge(TrainerRank rank, uint64_t incarnation,
                                                             const WayBack& back) {
  const Client* client = Find(rank, incarnation);
  if (client == nullptr) return NoSession(rank, incarnation);
  const Rollback acknowledged{back.to_step.value(), back.epoch.value()};
  const RankTable::Session& session = SessionOf(*client);
  if (session.must_acknowledge) {
    // A late call of an earlier one is no answer to this one.
    if (session.must_acknowledge != acknowledged) return NodeJob::CheckNotRolledBack(session);
    Perform(job_->Acknowledge(client->id));
    if (simulation_.chance.Of(20)) {  // once more, when the job may have gone back again
      simulation_.time.After(simulation_.chance.Pick(0, 3'000 * kMillisecond),
                             [this, rank, incarnation, back, boot = boot_] {
                               if (boot_ == boot) (void)Acknowledge(rank, incarnation, back);
                             });
    }
    if (Find(rank, incarnation) == nullptr) return NoSession(rank, incarnation);
  } else if (session.acknowledged != acknowledged) {
    return WithReason(absl::FailedPreconditionError("the job has not gone back"),
                      "STEP_OUT_OF_ORDER");
  }
  if (!job_->failure().ok()) return job_->failure();
  if (!job_->Restarted()) return std::nullopt;
  return job_->steps()->open().attempt;
}

bool SimulatedMember::EndsWait(TrainerRank rank, uint64_t incarnation, Attempt attempt) {
  return Find(rank, incarnation) == nullptr || published_ >= attempt.value();
}

void SimulatedMember::Leave(TrainerRank rank, uint64_t incarnation, const std::string& why) {
  const Client* client = Find(rank, incarnation);
  if (client == nullptr) return;
  leaving_ = rank;
  Perform(job_->OnTrainerGone(client->id, why));
  leaving_.reset();
  AdvanceDeparture();
}

// ---- the end ----

void SimulatedMember::CheckTheEnd(bool given_up) const {
  if (given_up) return;
  const History& now = simulation_.invariants.now();
  const StepMember* steps = job_->exists() ? job_->steps() : nullptr;
  if (steps == nullptr) return simulation_.Fail("a member has no job at the end");
  if (history_.consumed != now.consumed) simulation_.Fail("a member did not hear of all");
  if (steps->last_committed() != now.step) simulation_.Fail("a member is at another step");
  for (const SimulatedLane& lane : lanes_) {
    if (lane.applied() != now.applied) simulation_.Fail("a commit was not applied once");
    if (lane.publishing()) simulation_.Fail("weights were never published");
  }
}

std::string SimulatedMember::Describe() const {
  std::string text = absl::StrCat("; node ", node_.value(), alive_ ? "" : " dead");
  if (!job_) return text + " not begun";
  absl::StrAppend(&text, " epoch ", job_->epoch(), " ", Name(job_->phase()));
  if (!job_->exists()) return text;
  if (!job_->failure().ok()) absl::StrAppend(&text, " ", ReasonOf(job_->failure()));
  if (job_->steps() != nullptr) {
    absl::StrAppend(&text, " open ", job_->steps()->open().attempt.value() & 0xffff);
  }
  return text;
}

}  // namespace dmuond::scheduler::testing
