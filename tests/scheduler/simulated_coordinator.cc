#include "tests/scheduler/simulated_coordinator.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tests/scheduler/simulated_trainer.h"
#include "tests/scheduler/step_group.h"

namespace dmuond::scheduler::testing {
namespace {

constexpr std::chrono::milliseconds kStepTimeout{2'000};
constexpr int32_t kLaneDeathsMax = 3;
constexpr std::chrono::milliseconds kLeaversPatience{1'000};

}  // namespace

CoordinatorOptions SimulatedCoordinator::StepOptions() const {
  const SimulationOptions& options = simulation_.options;
  return {.step_timeout = kStepTimeout,
          .session_linger = options.lingers ? options.linger : std::chrono::milliseconds(0),
          .skips_max = 50};
}

Connection& SimulatedCoordinator::ConnectNext() {
  Connection& connection = simulation_.connections.emplace_back();
  connection.node = NodeRank(static_cast<int32_t>(connections_.size()));
  connections_.push_back(&connection);
  return connection;
}

void SimulatedCoordinator::BeginAttached() {
  JobOfCoordinator& job = job_.emplace();
  job.planned = true;
  for (SimulatedMember* member : simulation_.members) {
    Connection& connection = ConnectNext();
    member->Formed(connection, epoch_);
    const NodeRank node(static_cast<int32_t>(connections_.size()) - 1);
    states_[node] = {};
    for (TrainerRank rank : member->ranks()) {
      job.open_ranks[rank] = {node, 1};
      job.incarnations[rank] = 1;
      job.attached.insert(rank);
    }
  }
  job.steps = std::make_unique<StepCoordinator>(simulation_.world.inputs, simulation_.world.plan,
                                                kFirstAttempt, StepId(0), StepOptions());
  if (simulation_.options.snapshot_every > 0) {
    job.schedule.emplace(
        SnapshotOptions{simulation_.options.snapshot_every, std::chrono::milliseconds(0)},
        std::nullopt, simulation_.Now());
  }
  // Nobody is attached before its node knows of the first attempt.
  simulation_.invariants.Opened(job.steps->Current());
  for (SimulatedMember* member : simulation_.members) member->Handle(job.steps->Current());
}

// ---- what it tells ----

void SimulatedCoordinator::Perform(const Actions& actions, bool again) {
  StepInvariants& invariants = simulation_.invariants;
  for (const CoordinatorAction& action : actions) {
    if (const auto* decision = std::get_if<Decision>(&action)) {
      invariants.Decided(*decision, again, !simulation_.FateOf(decision->step, "nan", 15));
      Snapshot(action);
      continue;
    }
    if (const auto* open = std::get_if<OpenAttempt>(&action)) invariants.Opened(*open);
    if (const auto* go = std::get_if<Go>(&action)) invariants.Went(*go);
    if (const auto* begun = std::get_if<Begun>(&action)) invariants.ToldBegun(*begun);
    if (const auto* republish = std::get_if<Republish>(&action)) {
      invariants.Republished(*republish);
      job_->state = {republish->attempt, republish->step};
    }
    ToMembers([shared = std::make_shared<const CoordinatorAction>(action)](
                  SimulatedMember& member) { member.Handle(*shared); },
              5);
  }
}

// A decision names the durable step, and where a snapshot falls due it is begun.
void SimulatedCoordinator::Snapshot(const CoordinatorAction& action) {
  Decision decision = std::get<Decision>(action);
  simulation_.Trace("decided: attempt ", decision.attempt.value() >> 32, ".",
                    decision.attempt.value() & 0xffff, " step ", decision.step.value(), " verdict ",
                    static_cast<int32_t>(decision.verdict), " ", decision.outcome.detail);
  const bool consumes = decision.verdict == Verdict::kCommit || decision.verdict == Verdict::kSkip;
  std::optional<SnapshotId> save;
  // One that is told again has had its snapshot.
  if (job_->schedule && consumes && decision.attempt > job_->state.attempt) {
    const bool step = decision.kind == AttemptKind::kStep;
    job_->state = {decision.attempt, step ? decision.step : job_->state.step};
    if (step && job_->schedule->OnCommitted(decision.step, simulation_.Now())) save = job_->state;
  }
  if (job_->schedule) decision.outcome.durable_step = job_->schedule->durable_step();
  ToMembers([shared = std::make_shared<const CoordinatorAction>(std::move(decision))](
                SimulatedMember& member) { member.Handle(*shared); },
            5);
  if (save) BeginSnapshot(*save);
}

void SimulatedCoordinator::BeginSnapshot(const SnapshotId& id) {
  job_->requested = false;
  simulation_.invariants.SaveBegins(id);
  job_->writing = SnapshotUnderWay{.id = id};
  // New lanes may have to finish the last commit first: it is told again, and this after it.
  if (job_->interrupted) return;
  ToMembers([id](SimulatedMember& member) { member.HandleSave(id); });
}

// ---- steps ----

void SimulatedCoordinator::OnSubmission(const Submission& submission) {
  if (!job_ || !job_->steps) return;
  Perform(job_->steps->OnSubmission(simulation_.Now(), submission));
}

void SimulatedCoordinator::OnRailReady(NodeRank from, LaneIndex rail, RailOperation operation,
                                       BucketId bucket, Attempt attempt, AttemptKind kind,
                                       bool gradients) {
  if (!job_ || !job_->steps) return;
  simulation_.invariants.ToldReady(attempt, operation, rail, bucket, from, gradients);
  Perform(
      job_->steps->OnRailReady(simulation_.Now(), attempt, from, rail, operation, bucket, kind));
}

void SimulatedCoordinator::OnVote(NodeRank from, Attempt attempt,
                                  const std::vector<UnitNorm>& norms) {
  if (!job_ || !job_->steps) return;
  Perform(job_->steps->OnVote(simulation_.Now(), attempt, from, simulation_.world.plan.digest,
                              norms, ""));
}

void SimulatedCoordinator::Tick() {
  if (job_ && job_->steps) {
    const bool lost = job_->steps->lost();
    Perform(job_->steps->OnTick(simulation_.Now()));
    if (!lost && job_->steps->lost()) GaveUpAPlace();
    if (job_->steps->lost() && job_->open_ranks.empty()) EndJob(JobEnd::kEveryRankLeft);
  }
  HaltForLeavers();
}

// Places wait for longer than anybody here needs to come back to one.
void SimulatedCoordinator::GaveUpAPlace() {
  const auto& trainers = simulation_.trainers;
  const bool will_not_come = std::any_of(
      trainers.begin(), trainers.end(),
      [](const SimulatedTrainer* trainer) { return trainer->Rests() && !trainer->finished(); });
  if (!will_not_come) simulation_.Fail("a place was given up, and its replacement asks for it");
  simulation_.disturbed = true;
}

// ---- ranks ----

// What is said of trainers waits until it is known which job goes on.
bool SimulatedCoordinator::Heard(Event event) {
  if (Formed()) return true;
  early_.push_back(std::move(event));
  return false;
}

void SimulatedCoordinator::OnRankSession(NodeRank from, TrainerRank rank, uint64_t incarnation,
                                         std::optional<SnapshotId> resume) {
  if (!Heard([=, this] { OnRankSession(from, rank, incarnation, resume); })) return;
  if (!job_) job_.emplace().restore = resume;
  if (!job_->planned && job_->restore != resume) {
    return simulation_.Fail("daemons find different snapshots to go on from");
  }
  job_->open_ranks[rank] = {from, incarnation};
}

void SimulatedCoordinator::OnRegistration(NodeRank from, TrainerRank rank) {
  if (!Heard([=, this] { OnRegistration(from, rank); })) return;
  if (!job_ || job_->planned) return;
  const auto open = job_->open_ranks.find(rank);
  if (open == job_->open_ranks.end() || open->second.first != from) return;
  job_->registered.insert(rank);
  if (job_->registered.size() < world()) return;
  job_->planned = true;
  simulation_.Trace("planned from registrations");
  if (job_->restore) {
    simulation_.invariants.RolledBack(*job_->restore, GroupEpoch(epoch_), /*asked_for=*/false);
  } else {
    simulation_.invariants.BeganAnew();
  }
  ToMembers([restore = job_->restore](SimulatedMember& member) { member.HandlePlan(restore); });
}

void SimulatedCoordinator::OnRankAttached(TrainerRank rank, uint64_t incarnation) {
  if (!Heard([=, this] { OnRankAttached(rank, incarnation); })) return;
  if (!job_) return;
  job_->attached.insert(rank);
  if (!job_->steps) return;
  uint64_t& newest = job_->incarnations[rank];
  newest = std::max(newest, incarnation);
  job_->steps->OnRankBack(simulation_.Now(), rank, incarnation);
  if (job_->interrupted) return;  // it restarts when there are lanes again
  if (job_->attached.size() < world() || !job_->restore || job_->steps->has_state()) return;
  job_->rolled_back = false;
  Perform(job_->steps->Restart());
}

void SimulatedCoordinator::OnRankGone(NodeRank from, TrainerRank rank, uint64_t incarnation,
                                      const std::string& why) {
  if (!Heard([=, this] { OnRankGone(from, rank, incarnation, why); })) return;
  if (!job_) return;
  const auto open = job_->open_ranks.find(rank);
  if (open == job_->open_ranks.end() || open->second != std::pair(from, incarnation)) {
    // Its own machine must know as much.
    if (job_->steps && incarnation < job_->incarnations[rank] &&
        !job_->steps->OnRankGone(simulation_.Now(), rank, incarnation, why).empty()) {
      simulation_.Fail("the end of an older incarnation was heard");
    }
    return;
  }
  job_->open_ranks.erase(open);
  job_->attached.erase(rank);
  if (!job_->planned) job_->registered.erase(rank);
  if (job_->rolled_back && !job_->steps) return;
  const bool replaceable = job_->steps && !job_->steps->lost();
  const bool keeps = job_->rolled_back || (job_->steps && job_->steps->has_state());
  if (job_->open_ranks.empty() && !(replaceable && keeps)) return EndJob(JobEnd::kEveryRankLeft);
  if (!job_->steps) return Lost(OutcomeReason::kTrainerMissing, why);
  Perform(job_->steps->OnRankGone(simulation_.Now(), rank, incarnation, why));
  if (job_->steps->lost() && job_->open_ranks.empty()) EndJob(JobEnd::kEveryRankLeft);
}

// ---- the group ----

void SimulatedCoordinator::Die() {
  simulation_.Trace("the coordinator dies");
  formed_ = false;
  epoch_ = 0;
  attempts_ = 0;
  states_.clear();
  early_.clear();
  finding_ = false;
  leavers_.clear();
  job_.reset();
  for (Connection* connection : connections_) connection->ended_at_coordinator = true;
  Break("the coordinator died");
}

void SimulatedCoordinator::Break(const std::string& why) {
  simulation_.Trace("the group breaks: ", why);
  if (formed_ && job_) {
    if (!job_->steps && job_->rolled_back) {
    } else if (!job_->steps || job_->steps->lost() || !simulation_.options.lingers) {
      Lost(OutcomeReason::kPeerLost, why);
    } else {
      job_->steps->Suspend();
      job_->interrupted = true;
    }
  }
  formed_ = false;
  states_.clear();
  early_.clear();
  finding_ = false;
  leavers_.clear();
  for (size_t node = 0; node < connections_.size(); ++node) {
    Connection* connection = connections_[node];
    connection->ended_at_coordinator = true;
    SimulatedMember* member = simulation_.members[node];
    simulation_.time.After(simulation_.chance.Pick(0, 20 * kMillisecond), [connection, member] {
      if (std::exchange(connection->ended_at_member, true)) return;
      if (member->alive() && member->connected()) member->Broken();
    });
  }
  connections_.clear();
  if (!std::exchange(forming_, true)) {
    simulation_.time.After(simulation_.chance.Pick(20, 400) * kMillisecond, [this] { Form(); });
  }
}

// When every daemon is there, and has noticed that the last group is no more.
void SimulatedCoordinator::Form() {
  for (const SimulatedMember* member : simulation_.members) {
    if (member->alive() && !member->connected()) continue;
    simulation_.time.After(simulation_.chance.Pick(10, 100) * kMillisecond, [this] { Form(); });
    return;
  }
  forming_ = false;
  formed_ = true;
  epoch_ = ++newest_epoch_;
  attempts_ = 0;
  if (job_ && !job_->steps) job_.reset();
  simulation_.Trace("the group forms, epoch ", epoch_);
  for (SimulatedMember* member : simulation_.members) {
    Connection& connection = ConnectNext();
    simulation_.network.Down(connection, 0, [member, &connection, epoch = epoch_] {
      member->Formed(connection, epoch);
    });
  }
}

void SimulatedCoordinator::OnState(NodeRank from, const MemberState& state) {
  if (state.epoch < epoch_) return;
  states_[from] = state;
  if (states_.size() == nodes()) FormAnew(std::nullopt);
}

void SimulatedCoordinator::OnNewest(uint32_t epoch, std::optional<SnapshotId> newest) {
  if (!finding_ || epoch != epoch_) return;
  finding_ = false;
  FormAnew(newest);
}

void SimulatedCoordinator::FormAnew(std::optional<std::optional<SnapshotId>> newest) {
  GoOn(newest);
  if (finding_) return;
  for (Event& event : std::exchange(early_, {})) event();
}

void SimulatedCoordinator::GoOn(std::optional<std::optional<SnapshotId>> newest) {
  if (job_lost()) return EndJob(JobEnd::kPeerLost);
  bool anybody = false;
  bool has_state = false;
  bool everywhere = job_ && job_->steps;
  bool planned = false;  // at who has the job
  for (const auto& [node, state] : states_) {
    if (state.has_job && (!anybody || state.has_state)) planned = state.has_memory;
    anybody = anybody || state.has_job;
    has_state = has_state || state.has_state;
    everywhere = everywhere && state.has_job && state.has_memory;
  }
  if (everywhere) {
    job_->interrupted = true;
    return Reform();
  }
  if (!anybody) {
    job_.reset();
    return;
  }
  if (has_state && !newest) {
    finding_ = true;
    return simulation_.members[0]->FindNewest(epoch_);
  }
  if (has_state && *newest && planned) return RollBack(**newest, /*asked_for=*/false);
  simulation_.disturbed = true;
  if (has_state) simulation_.invariants.StateLost(newest->has_value());
  const JobEnd why = has_state ? JobEnd::kStateLost : JobEnd::kPeerLost;
  job_.reset();
  for (const auto& [node, state] : states_) {
    if (!state.has_job) continue;
    simulation_.network.Down(
        *connections_[node.value()], 0,
        [why, member = simulation_.members[node.value()]] { member->HandleJobEnded(why); });
  }
}

void SimulatedCoordinator::NextEpoch() {
  epoch_ = ++newest_epoch_;
  attempts_ = 0;
}

void SimulatedCoordinator::Reform() {
  simulation_.Trace("reform, epoch ", epoch_);
  ++simulation_.counts.reformations;
  job_->steps->Suspend();
  job_->ready.clear();
  ToMembers([epoch = epoch_](SimulatedMember& member) { member.HandleReform(epoch); });
}

void SimulatedCoordinator::RollBack(const SnapshotId& to, bool asked_for) {
  simulation_.Trace("roll back to step ", to.step.value(), ", epoch ", epoch_);
  simulation_.invariants.RolledBack(to, GroupEpoch(epoch_), asked_for);
  JobOfCoordinator job;
  job.planned = job.rolled_back = true;
  job.restore = to;
  job.back_epoch = epoch_;
  if (job_) {
    job.deaths_in = job_->deaths_in;
    job.deaths = job_->deaths;
  }
  job_ = std::move(job);
  ToMembers([epoch = epoch_, to](SimulatedMember& member) { member.HandleRollBack(epoch, to); });
}

void SimulatedCoordinator::OnLoad(uint32_t epoch, const SnapshotId& to) {
  // What was found before the last way back may be set aside.
  if (!job_ || !job_->planned || !Formed() || epoch < job_->back_epoch) return;
  NextEpoch();
  RollBack(to, /*asked_for=*/true);
}

bool SimulatedCoordinator::MayLoseALane() {
  const StepId step = job_->steps     ? job_->steps->Current().step
                      : job_->restore ? StepId(job_->restore->step.value() + 1)
                                      : StepId(1);
  job_->deaths = job_->deaths_in == step ? job_->deaths + 1 : 1;
  job_->deaths_in = step;
  return job_->deaths < kLaneDeathsMax;
}

void SimulatedCoordinator::OnLaneLost(uint32_t epoch) {
  if (!job_ || epoch != epoch_ || !Formed()) return;
  if (!job_->steps && job_->rolled_back) {
    if (!MayLoseALane()) {
      simulation_.disturbed = true;
      return EndJob(JobEnd::kPeerLost);
    }
    NextEpoch();
    return RollBack(*job_->restore, /*asked_for=*/false);
  }
  if (!job_->steps) return Lost(OutcomeReason::kLaneLost, "a lane died");
  if (!MayLoseALane()) {
    job_->interrupted = false;
    return LanesLost("lanes die too often");
  }
  job_->interrupted = true;
  NextEpoch();
  Reform();
}

void SimulatedCoordinator::OnPlanReady(NodeRank from, uint32_t epoch) {
  if (!job_ || !job_->planned || epoch != epoch_) return;
  if (job_->steps && !job_->interrupted) return;
  job_->ready.insert(from);
  if (job_->ready.size() < nodes()) return;
  const Attempt first = MakeAttempt(GroupEpoch(epoch_), ++attempts_);
  if (job_->steps) {
    job_->interrupted = false;
    Actions actions = job_->steps->OnReformed(first, OutcomeReason::kLaneLost, "new lanes");
    // A commit that is told again comes first: lanes copy what they have finished.
    if (job_->writing && actions.size() > 1 && std::holds_alternative<Decision>(actions[1])) {
      Perform({actions.front()}, /*again=*/true);
      actions.erase(actions.begin());
    }
    // Members may have missed what was said to them, and it what they said: once more.
    if (job_->writing) {
      ToMembers([id = job_->writing->id](SimulatedMember& member) { member.HandleSave(id); });
    }
    Perform(actions, /*again=*/true);
    return RestartWhenAttached();
  }
  job_->steps = std::make_unique<StepCoordinator>(
      simulation_.world.inputs, simulation_.world.plan, first,
      job_->restore ? job_->restore->step : StepId(0), StepOptions());
  if (simulation_.options.snapshot_every > 0) {
    std::optional<StepId> durable;
    if (job_->restore) durable = job_->restore->step;
    job_->schedule.emplace(
        SnapshotOptions{simulation_.options.snapshot_every, std::chrono::milliseconds(0)}, durable,
        simulation_.Now());
  }
  Perform({job_->steps->Current()});
  RestartWhenAttached();
}

void SimulatedCoordinator::OnPlanFailed(uint32_t epoch) {
  if (!job_ || !job_->planned || epoch != epoch_) return;
  if (job_->steps && !job_->interrupted) return;
  simulation_.disturbed = true;
  if (job_->rolled_back && !job_->steps) return EndJob(JobEnd::kPeerLost);
  if (job_->steps) return LanesLost("a node cannot go on");
  Refuse();
}

void SimulatedCoordinator::RestartWhenAttached() {
  if (!job_->rolled_back) {
    const bool complete = job_->attached.size() == world();
    if (!job_->restore || job_->steps->has_state() || !complete) return;
    return Perform(job_->steps->Restart());
  }
  job_->steps->Suspend();
  for (const SimulatedMember* member : simulation_.members) {
    for (const TrainerRank rank : member->ranks()) {
      const auto open = job_->open_ranks.find(rank);
      if (job_->attached.contains(rank) && open != job_->open_ranks.end()) {
        job_->steps->OnRankBack(simulation_.Now(), rank, open->second.second);
      } else if (open == job_->open_ranks.end()) {
        // Its place waits, as that of any trainer that died.
        (void)job_->steps->OnRankGone(simulation_.Now(), rank, 0, "it has not come back");
      }
    }
  }
  if (job_->attached.size() < world()) return;
  job_->rolled_back = false;
  Perform(job_->steps->Restart());
}

void SimulatedCoordinator::LanesLost(const std::string& why) {
  if (job_->steps->lost()) return EndJob(JobEnd::kPeerLost);
  Lost(OutcomeReason::kLaneLost, why);
}

void SimulatedCoordinator::Lost(OutcomeReason reason, const std::string& why) {
  if (!job_) return;
  if (job_->steps) {
    simulation_.disturbed = true;
    return Perform(job_->steps->OnLost(simulation_.Now(), reason, why));
  }
  if (!job_->planned && reason == OutcomeReason::kTrainerMissing) return;
  Refuse();
}

void SimulatedCoordinator::Refuse() {
  simulation_.Trace("the registration is refused");
  job_->registered.clear();
  job_->ready.clear();
  job_->planned = false;
  ToMembers([](SimulatedMember& member) { member.HandleRefused(); });
}

void SimulatedCoordinator::EndJob(JobEnd why) {
  simulation_.Trace("the job ends, ", static_cast<int32_t>(why));
  if (job_ && job_->steps) {
    attempts_ = static_cast<uint32_t>(job_->steps->Current().attempt.value());
  }
  job_.reset();
  ToMembers([why](SimulatedMember& member) { member.HandleJobEnded(why); });
}

// ---- snapshots ----

void SimulatedCoordinator::OnSnapshotWritten(NodeRank from, Attempt attempt,
                                             const std::vector<uint64_t>& states) {
  if (!job_ || !job_->writing || job_->writing->id.attempt != attempt) return;
  SnapshotUnderWay& writing = *job_->writing;
  if (writing.states.contains(from)) return;
  writing.failed = writing.failed || states.empty();
  writing.states[from] = states;
  if (writing.states.size() < nodes()) return;
  std::vector<uint64_t> all;
  for (const auto& [node, mine] : writing.states) all.insert(all.end(), mine.begin(), mine.end());
  if (writing.failed) all.clear();
  simulation_.members[0]->HandleWriteManifest(writing.id, all);  // in this very process
}

void SimulatedCoordinator::OnManifestWritten(Attempt attempt, bool written) {
  if (!job_ || !job_->writing || job_->writing->id.attempt != attempt) return;
  if (!written) ++simulation_.counts.failed_snapshots;
  const SnapshotId id = job_->writing->id;
  job_->writing.reset();
  job_->schedule->OnFinished(written);
  if (written) job_->durable = id;
  TellDone(id, written);
  if (!job_->requested) return;
  job_->schedule->Request();
  if (job_->schedule->OnCommitted(job_->state.step, simulation_.Now())) BeginSnapshot(job_->state);
}

void SimulatedCoordinator::TellDone(const SnapshotId& id, bool written) {
  ToMembers([id, written](SimulatedMember& member) { member.HandleSnapshotDone(id, written); });
}

void SimulatedCoordinator::OnSnapshotRequest(NodeRank /*from*/) {
  if (!job_ || !job_->schedule) return;
  // One that goes back and has not begun again has nothing to save.
  if (job_->state == SnapshotId{}) return TellDone(job_->state, false);
  if (job_->durable == job_->state) return TellDone(job_->state, true);
  if (job_->writing) {
    job_->requested = job_->writing->id != job_->state;
    return;
  }
  job_->schedule->Request();
  if (job_->schedule->OnCommitted(job_->state.step, simulation_.Now())) BeginSnapshot(job_->state);
}

// ---- planned departures ----

void SimulatedCoordinator::OnLeaving(NodeRank from) {
  leavers_[from] = {simulation_.Now() + kLeaversPatience, false};
}

void SimulatedCoordinator::HaltForLeavers() {
  if (leavers_.empty() || !Formed() || (job_ && job_->interrupted)) return;
  if (job_ && job_->steps) {
    bool patient = true;
    for (const auto& [node, leaver] : leavers_) {
      patient = patient && simulation_.Now() < leaver.first;
    }
    if (job_->steps->in_flight() && !job_->steps->lost() && patient) return;
    job_->steps->Halt();
  }
  for (auto& [node, leaver] : leavers_) {
    if (std::exchange(leaver.second, true)) continue;
    simulation_.Trace("halted for node ", node.value());
    simulation_.network.Down(*connections_[node.value()], 0,
                             [member = simulation_.members[node.value()]] { member->Halted(); });
  }
}

// ---- the end ----

void SimulatedCoordinator::CheckTheEnd() const {
  if (job_ && job_->schedule && job_->schedule->being_written()) {
    simulation_.Fail("a snapshot is being written for ever");
  }
}

bool SimulatedCoordinator::Settled() const {
  if (!formed_ || !Formed()) return false;
  // One that registers, or restarts, may wait for ranks.
  return !job_ || job_lost() || !job_->planned || (job_->steps && !job_->interrupted);
}

std::string SimulatedCoordinator::Describe() const {
  std::string text = absl::StrCat("epoch ", epoch_, formed_ ? " formed" : " broken");
  if (!job_) return text + " no job";
  absl::StrAppend(&text, " ranks ", job_->open_ranks.size(), " attached ", job_->attached.size(),
                  " ready ", job_->ready.size(), job_->planned ? " planned" : "",
                  job_->rolled_back ? " rolled back" : "", job_->interrupted ? " interrupted" : "");
  if (job_->steps) {
    absl::StrAppend(&text, " open ", job_->steps->Current().attempt.value() & 0xffff,
                    job_->steps->lost() ? " lost" : "");
  }
  return text;
}

}  // namespace dmuond::scheduler::testing
