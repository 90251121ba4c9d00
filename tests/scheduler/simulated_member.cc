#include "tests/scheduler/simulated_member.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/convert/convert.h"
#include "scheduler/reason.h"
#include "tests/scheduler/simulated_coordinator.h"
#include "tests/scheduler/simulated_trainer.h"

namespace dmuond::scheduler::testing {
namespace {

// Of a lane's silence: part of it longer than the coordinator waits for a vote.
constexpr std::chrono::milliseconds kLaneTimeout{2'500};

absl::Status Unavailable(const char* reason) {
  return WithReason(absl::UnavailableError(reason), reason);
}
}  // namespace

SimulatedMember::SimulatedMember(Simulation& simulation, NodeRank node,
                                 std::vector<TrainerRank> ranks)
    : simulation_(simulation),
      node_(node),
      ranks_(std::move(ranks)),
      reports_(simulation.world.inputs.nodes > 1) {
  for (int32_t rail = 0; rail < simulation.world.inputs.lanes_per_node; ++rail) {
    lanes_.emplace_back(simulation, *this, node, LaneIndex(rail));
  }
}

void SimulatedMember::BeginAttached(const v1::PlanInputs& plan) {
  job_.emplace().plan = std::make_shared<const v1::PlanInputs>(plan);
  PlanReports();
  lane_epoch_ = 1;
  for (TrainerRank rank : ranks_) {
    Session& session = sessions_[rank];
    session.incarnation = ++incarnations_[rank];
    session.attached = session.replied = true;
  }
}

// ---- what it says ----

void SimulatedMember::Tell(v1::MemberMessage message) { Send(reports_.Tell(std::move(message))); }

void SimulatedMember::Send(OutgoingReports::Messages messages) {
  for (v1::MemberMessage& message : messages) {
    if (connection_ == nullptr) continue;  // nobody hears it
    // What belongs to one attempt is repeated now and then, as after a reconnect.
    const int32_t replay_percent = message.has_reports() || message.has_vote() ? 5 : 0;
    simulation_.network.Up(*connection_, replay_percent,
                           [message = std::make_shared<const v1::MemberMessage>(std::move(message)),
                            this] { TellHere(*message); });
  }
  simulation_.At(reports_.due(), [this, boot = boot_] {
    if (boot_ == boot) Send(reports_.OnDue(simulation_.Now()));
  });
}

void SimulatedMember::PlanReports() {
  const auto first = simulation_.world.programs.begin() +
                     static_cast<std::ptrdiff_t>(node_.value() * lanes_.size());
  reports_.OnPlan({first, first + static_cast<std::ptrdiff_t>(lanes_.size())},
                  static_cast<int32_t>(ranks_.size()));
}

void SimulatedMember::TellHere(const v1::MemberMessage& message) {
  simulation_.coordinator->Hear(node_, message);
}

v1::MemberMessage SimulatedMember::State() const {
  v1::MemberMessage message;
  v1::MemberState& state = *message.mutable_member_state();
  state.set_epoch(epoch_);
  if (!job_ || !job_->failed.ok()) return message;
  state.set_job(kSimulatedJob);
  state.set_has_memory(job_->has_plan());
  state.set_has_state(job_->has_state || job_->restore.has_value());
  if (!job_->has_plan()) return message;
  state.set_job_incarnation(job_->plan->job_incarnation());
  *state.mutable_plan() = *job_->plan;
  return message;
}

v1::MemberMessage SimulatedMember::SessionOf(TrainerRank rank) const {
  v1::MemberMessage message;
  v1::RankSession& session = *message.mutable_rank_session();
  session.set_rank(rank.value());
  session.set_node(node_.value());
  session.set_job(kSimulatedJob);
  session.set_world_size(static_cast<int32_t>(simulation_.world.registrations.size()));
  const auto found = sessions_.find(rank);
  session.set_incarnation(found == sessions_.end() ? 1 : found->second.incarnation);
  if (job_ && job_->resume) session.set_restore_step(job_->resume->step.value());
  return message;
}

v1::MemberMessage SimulatedMember::RegistrationOf(TrainerRank rank) const {
  v1::MemberMessage message;
  *message.mutable_registration() = simulation_.world.registrations[rank.value()];
  return message;
}

v1::MemberMessage SimulatedMember::AttachedOf(TrainerRank rank) const {
  v1::MemberMessage message;
  message.mutable_rank_attached()->set_rank(rank.value());
  message.mutable_rank_attached()->set_incarnation(sessions_.at(rank).incarnation);
  message.mutable_rank_attached()->set_epoch(epoch_);
  return message;
}

v1::MemberMessage SimulatedMember::PlanIsReady() const {
  v1::MemberMessage message;
  message.mutable_plan_ready()->set_node(node_.value());
  message.mutable_plan_ready()->set_digest(simulation_.world.plan.digest);
  message.mutable_plan_ready()->set_epoch(lane_epoch_);
  return message;
}

// ---- what it hears ----

void SimulatedMember::Hear(const std::shared_ptr<const v1::CoordinatorMessage>& message) {
  using Kind = v1::CoordinatorMessage::MessageCase;
  const v1::CoordinatorMessage& heard = *message;
  switch (heard.message_case()) {
    case Kind::kOpen:
      return HandleAttempt(FromProto(heard.open()));
    case Kind::kGoes:
      for (const v1::Go& go : heard.goes().goes()) HandleAttempt(*FromProto(go));
      return;
    case Kind::kSubmitted:
      return HandleAttempt(Begun{node_, *FromProto(heard.submitted())});
    case Kind::kDecision:
      return HandleAttempt(*FromProto(heard.decision()));
    case Kind::kRepublish:
      return HandleAttempt(
          Republish{Attempt(heard.republish().attempt()), StepId(heard.republish().step())});
    case Kind::kExpel:
      return HandleAttempt(Expel{TrainerRank(heard.expel().rank()),
                                 Attempt(heard.expel().attempt()), heard.expel().detail()});
    case Kind::kGatherOverdue:
      return HandleAttempt(GatherOverdue{node_, Attempt(heard.gather_overdue().attempt()),
                                         heard.gather_overdue().detail()});
    case Kind::kReform:
      return HandleReform(heard.reform().epoch());
    case Kind::kRollBack:
      return HandleRollBack(heard.roll_back().epoch(), {message, &heard.roll_back().plan()});
    case Kind::kPlan:
      return HandlePlan({message, &heard.plan()});
    case Kind::kRefused:
      return HandleRefused();
    case Kind::kSave:
      return HandleSave({Attempt(heard.save().attempt()), StepId(heard.save().step())});
    case Kind::kFindSnapshot:
      return FindNewest(heard.find_snapshot().epoch());
    case Kind::kWriteManifest:
      return HandleWriteManifest(heard.write_manifest().manifest());
    case Kind::kSnapshotDone:
      return HandleSnapshotDone(heard.snapshot_done());
    case Kind::kHalted:
      return HandleHalted(heard.halted());
    case Kind::kJobEnded:
      return HandleJobEnded(heard.job_ended());
    default:
      simulation_.Fail("a member hears what it does not know");
  }
}

// ---- the group ----

void SimulatedMember::Formed(Connection& connection, uint32_t epoch) {
  connection_ = &connection;
  epoch_ = epoch;
  halted_ = false;
  reports_.Forget();
  if (epoch > 1) Tell(State());
  if (leaves_) TellLeaving();
}

void SimulatedMember::Broken() {
  simulation_.Trace("node ", node_.value(), " sees the group broken");
  connection_ = nullptr;
  epoch_ = 0;
  halted_ = false;
  if (!job_) return;
  // One that goes back begins to do so again when the group has formed.
  if ((!steps_ && !job_->rolled_back) || !simulation_.options.lingers) {
    Abandon(Unavailable("PEER_LOST"));
  }
}

void SimulatedMember::Die() {
  simulation_.Trace("the daemon of node ", node_.value(), " dies");
  alive_ = false;
  ++boot_;
  if (leaves_) std::exchange(leaves_, nullptr)();
  connection_ = nullptr;
  epoch_ = 0;
  halted_ = false;
  job_.reset();
  steps_.reset();
  history_ = {};
  incarnations_.clear();
  ended_.clear();
  reports_.Forget();
  copying_.reset();
  committing_.reset();
  disk_hangs_ = false;
  ++generation_;
  armed_ = republished_ = Attempt(0);
  for (SimulatedLane& lane : lanes_) {
    lane.Die();
    lane.ForgetMemory();
  }
  sessions_.clear();
  for (TrainerRank rank : ranks_) simulation_.trainers[rank.value()]->DaemonDied();
}

void SimulatedMember::Start() { alive_ = true; }

void SimulatedMember::LaneDies(LaneIndex rail) {
  SimulatedLane& lane = lanes_[rail.value()];
  if (!alive_ || !job_ || !job_->has_plan() || lane.dead()) return;
  ++simulation_.counts.lane_deaths;
  simulation_.Trace("a lane of node ", node_.value(), " dies");
  lane.Die();
  EndCopy(false);
  v1::MemberMessage message;
  message.mutable_lane_lost()->set_lane(node_.value() * static_cast<int32_t>(lanes_.size()) +
                                        rail.value());
  message.mutable_lane_lost()->set_epoch(lane_epoch_);
  message.mutable_lane_lost()->set_detail("it died");
  Tell(std::move(message));
}

void SimulatedMember::LaneHangs(LaneIndex rail) {
  SimulatedLane& lane = lanes_[rail.value()];
  if (!alive_ || !job_ || !job_->has_plan() || lane.dead() || lane.hangs()) return;
  ++simulation_.counts.lane_hangs;
  simulation_.Trace("a lane of node ", node_.value(), " hangs");
  lane.Hang();
  // Its watch; or the coordinator misses the node's vote before.
  simulation_.time.After(simulation_.chance.Pick(1, kLaneTimeout.count()) * kMillisecond,
                         [this, rail, generation = lane.generation()] {
                           SimulatedLane& hung = lanes_[rail.value()];
                           if (hung.hangs() && hung.generation() == generation) LaneDies(rail);
                         });
}

// ---- steps ----

void SimulatedMember::BeginSteps(StepId last_committed) {
  if (steps_) return;
  steps_.emplace(ranks_, simulation_.world.inputs.lanes_per_node, last_committed);
  job_->rolled_back = false;
}

void SimulatedMember::HandleAttempt(const CoordinatorAction& action) {
  if (!job_ || !job_->has_plan()) return;
  if (const auto* open = std::get_if<OpenAttempt>(&action)) {
    BeginSteps(StepId(open->step.value() - 1));
    steps_->OnOpen(*open);
    reports_.OnOpen(simulation_.Now(), *open);
    if (armed_ < open->attempt) {
      armed_ = open->attempt;
      for (SimulatedLane& lane : lanes_) lane.Arm(*open);
    }
    return;
  }
  // The link may have broken before the first attempt of a job that went back was heard of.
  if (const auto* republish = std::get_if<Republish>(&action)) BeginSteps(republish->step);
  if (!steps_) return;
  const Attempt before = steps_->open().attempt;
  if (const auto* decision = std::get_if<Decision>(&action)) {
    Decide(*decision);
  } else if (const auto* begun = std::get_if<Begun>(&action)) {
    if (begun->node != node_) return;
    for (SimulatedLane& lane : lanes_) lane.Begun(begun->submission);
  } else if (const auto* overdue = std::get_if<GatherOverdue>(&action)) {
    if (overdue->node != node_ || overdue->attempt != steps_->open().attempt) return;
    for (size_t rail = 0; rail < lanes_.size(); ++rail) {
      if (lanes_[rail].hangs()) LaneDies(LaneIndex(static_cast<int32_t>(rail)));
    }
  } else if (const auto* expel = std::get_if<Expel>(&action)) {
    Expelled(*expel);
  } else if (const auto* republish = std::get_if<Republish>(&action)) {
    if (republished_ >= republish->attempt) return;
    republished_ = republish->attempt;
    job_->has_state = true;
    job_->applied_attempt = std::max(job_->applied_attempt, republish->attempt);
    for (SimulatedLane& lane : lanes_) lane.Publish(republish->attempt);
  } else if (const auto* go = std::get_if<Go>(&action)) {
    lanes_[go->rail.value()].Go(*go);
  }
  if (steps_ && steps_->open().attempt < before) {
    simulation_.Fail("a member went back to an older attempt");
  }
}

void SimulatedMember::Decide(const Decision& decision) {
  const bool commit = decision.verdict == Verdict::kCommit;
  if (decision.attempt < steps_->open().attempt) {
    // Told again: new lanes apply what their predecessors did not live to, and publish later.
    if (!commit) return;
    for (SimulatedLane& lane : lanes_) lane.Redo(decision);
    return;
  }
  for (SimulatedLane& lane : lanes_) lane.Decide(decision);
  steps_->OnDecision(decision);
  if (steps_->last_decision()->attempt != decision.attempt) {
    simulation_.Fail("a decision was not heard");
  }
  if (!commit && decision.verdict != Verdict::kSkip) return;
  history_ = simulation_.invariants.Heard(absl::StrCat("the member of node ", node_.value()),
                                          history_, decision.attempt);
  job_->applied_attempt = decision.attempt;
  if (commit) job_->has_state = true;
  if (decision.outcome.durable_step) {
    simulation_.invariants.ToldDurable(decision.attempt, *decision.outcome.durable_step,
                                       steps_->last_committed());
  }
}

void SimulatedMember::Expelled(const Expel& expel) {
  const auto session = sessions_.find(expel.rank);
  if (session == sessions_.end() || session->second.first_attempt > expel.attempt) return;
  simulation_.trainers[expel.rank.value()]->Die("it hangs");
}

void SimulatedMember::Ready(const RailReady& ready) {
  Send(reports_.OnReady(simulation_.Now(), ready));
}

void SimulatedMember::Gathered(LaneIndex rail, Attempt attempt,
                               const std::vector<UnitNorm>& norms) {
  if (!steps_) return;
  const auto norms_of_node = steps_->OnGathered(attempt, rail, norms);
  if (!norms_of_node) return;
  v1::MemberMessage message;
  v1::Vote& vote = *message.mutable_vote();
  vote.set_attempt(attempt.value());
  vote.set_node(node_.value());
  vote.set_plan_digest(simulation_.world.plan.digest);
  for (const UnitNorm& norm : *norms_of_node) *vote.add_norms() = ToProto(norm);
  Tell(std::move(message));
}

void SimulatedMember::ProgressLanes() {
  for (SimulatedLane& lane : lanes_) {
    simulation_.time.After(simulation_.chance.Pick(0, 500), [&lane] { lane.Progress(); });
  }
}

// ---- new epochs and rollbacks ----

void SimulatedMember::HandleReform(uint32_t epoch) {
  epoch_ = epoch;
  if (!job_ || !job_->has_plan() || !job_->failed.ok()) return TellPlanFailed();
  ReplaceLanes();
}

void SimulatedMember::ReplaceLanes() {
  job_->reforming = true;
  const uint64_t generation = ++generation_;
  EndCopy(false);
  for (SimulatedLane& lane : lanes_) lane.Die();
  simulation_.time.After(simulation_.chance.Pick(0, 100 * kMillisecond), [this, generation] {
    if (generation_ != generation || !job_ || !job_->failed.ok()) return;
    if (std::exchange(job_->forget_state, false)) {
      for (SimulatedLane& lane : lanes_) lane.ForgetMemory();
    }
    lane_epoch_ = epoch_;
    for (SimulatedLane& lane : lanes_) lane.Renew(lane_epoch_);
    simulation_.time.After(simulation_.chance.Pick(0, 200 * kMillisecond), [this, generation] {
      if (generation_ == generation && job_) LanesReady();
    });
  });
}

void SimulatedMember::LanesReady() {
  for (const SimulatedLane& lane : lanes_) {
    if (lane.dead()) return;
  }
  if (!job_->restore || job_->restored) return PlanReady();
  OnDisk([this, generation = generation_, from = *job_->restore] {
    if (generation_ != generation || !job_) return;
    const auto found = simulation_.disk.find(from);
    if (found == simulation_.disk.end()) {
      return simulation_.Fail("the snapshot that the job goes back to is not there");
    }
    for (size_t i = 0; i < lanes_.size(); ++i) {
      if (lanes_[i].dead()) return;
      lanes_[i].Load(found->second[node_.value() * lanes_.size() + i]);
    }
    job_->restored = true;
    history_ = simulation_.invariants.StateOf(from);
    LanesReady();
  });
}

void SimulatedMember::PlanReady() {
  simulation_.Trace("node ", node_.value(), " is ready, epoch ", lane_epoch_);
  if (std::exchange(job_->reforming, false)) TellRanksAgain();
  Tell(PlanIsReady());
}

// The snapshot that the job is to go on from.
std::optional<SnapshotId> SimulatedMember::RestoredBy(const v1::PlanInputs& plan) const {
  if (plan.restore_step() == 0) return std::nullopt;
  const StepId step(plan.restore_step());
  const std::optional<SnapshotId> found = simulation_.SnapshotOf(step);
  if (!found) simulation_.Fail("the snapshot that the job goes on from is not there");
  return found.value_or(SnapshotId{Attempt(0), step});
}

void SimulatedMember::TellPlanFailed() {
  v1::MemberMessage message;
  message.mutable_plan_ready()->set_node(node_.value());
  message.mutable_plan_ready()->set_epoch(epoch_);
  message.mutable_plan_ready()->set_error("it cannot go on");
  Tell(std::move(message));
}

void SimulatedMember::HandlePlan(const std::shared_ptr<const v1::PlanInputs>& plan) {
  if (!job_) job_.emplace();
  if (job_->has_plan()) return;
  job_->plan = plan;
  PlanReports();
  job_->restore = RestoredBy(*plan);
  const uint64_t generation = ++generation_;
  lane_epoch_ = epoch_;
  for (SimulatedLane& lane : lanes_) {
    lane.ForgetMemory();
    lane.Renew(lane_epoch_);
  }
  simulation_.time.After(simulation_.chance.Pick(0, 200 * kMillisecond), [this, generation] {
    if (generation_ == generation && job_) LanesReady();
  });
}

void SimulatedMember::HandleRefused() {
  if (!job_) return;
  for (auto& [rank, session] : sessions_) session.refused = true;
  ++generation_;
  for (SimulatedLane& lane : lanes_) lane.Die();
  EndCopy(false);
  job_->plan.reset();
  job_->restored = false;
  job_->restore.reset();
}

void SimulatedMember::HandleRollBack(uint32_t epoch,
                                     const std::shared_ptr<const v1::PlanInputs>& plan) {
  epoch_ = epoch;
  if (job_ && job_->abandoned && !job_->has_plan()) {
    for (const auto& [rank, session] : sessions_) ended_[rank] = session.incarnation;
    EndJob();
  }
  if (job_ && !job_->failed.ok()) return TellPlanFailed();
  if (!job_ || !job_->has_plan()) {
    HandlePlan(plan);
    job_->rolled_back = true;
    return;
  }
  job_->rolled_back = true;
  const WayBack back{StepId(plan->restore_step()), GroupEpoch(epoch)};
  for (auto& [rank, session] : sessions_) {
    if (session.attached) {
      session.must_acknowledge = back;
    } else {
      session.outdated = session.outdated || session.told != back.to_step;
    }
  }
  job_->plan = plan;
  job_->restore = RestoredBy(*plan);
  ForgetState();
  ReplaceLanes();
  for (const auto& [rank, session] : sessions_) {
    simulation_.trainers[rank.value()]->JobWentBack(back);
  }
}

void SimulatedMember::ForgetState() {
  steps_.reset();
  job_->has_state = false;
  job_->applied_attempt = Attempt(0);
  EndCopy(false);
  job_->restored = false;
  for (auto& [rank, vacancy] : job_->vacancies) vacancy = Attempt(0);
  job_->forget_state = true;
  if (node_.value() != 0) return;
  OnDisk([this, to = *job_->restore] {
    simulation_.disk.erase(simulation_.disk.upper_bound(to), simulation_.disk.end());
  });
}

void SimulatedMember::TellRanksAgain() {
  for (const auto& [rank, gone] : job_->gone) TellGone(rank, gone);
  for (const auto& [rank, session] : sessions_) {
    Tell(SessionOf(rank));
    if (session.attached && !session.must_acknowledge) Tell(AttachedOf(rank));
  }
}

void SimulatedMember::TellGone(TrainerRank rank, const GoneRank& gone) {
  v1::MemberMessage message;
  message.mutable_rank_gone()->set_rank(rank.value());
  message.mutable_rank_gone()->set_incarnation(gone.incarnation);
  message.mutable_rank_gone()->set_detail(gone.why);
  Tell(std::move(message));
}

// ---- the end of a job ----

void SimulatedMember::Fail(absl::Status why) {
  if (job_ && job_->failed.ok()) job_->failed = std::move(why);
}

void SimulatedMember::Abandon(absl::Status why) {
  Fail(std::move(why));
  job_->abandoned = true;
  if (sessions_.empty()) EndJob();
}

void SimulatedMember::EndJob() {
  ++generation_;
  EndCopy(false);
  for (SimulatedLane& lane : lanes_) lane.Die();
  sessions_.clear();
  steps_.reset();
  job_.reset();
  history_ = {};
}

void SimulatedMember::HandleJobEnded(const v1::JobEnded& ended) {
  simulation_.Trace("node ", node_.value(), " hears that the job ends");
  if (!job_) return;
  if (ended.reason().empty()) {
    // One that was lost ends with its last session, which has yet to hear of that. And of one that
    // registers, the news of who is here now has crossed with this.
    if (job_->abandoned || (!job_->has_plan() && !sessions_.empty())) return;
    for (const auto& [rank, session] : sessions_) ended_[rank] = session.incarnation;
    return EndJob();
  }
  const bool lost = ended.reason() == "STATE_LOST";
  if (steps_) {
    const OpenAttempt open = steps_->open();
    Decision decision;
    decision.attempt = open.attempt;
    decision.step = open.step;
    decision.outcome.step = open.step;
    decision.outcome.attempt = open.attempt;
    decision.outcome.reason = lost ? OutcomeReason::kStateLost : OutcomeReason::kPeerLost;
    decision.outcome.next_attempt = Attempt(open.attempt.value() + 1);
    steps_->OnDecision(decision);
  }
  Abandon(lost ? WithReason(absl::DataLossError("the state is lost"), "STATE_LOST")
               : Unavailable("PEER_LOST"));
}

// ---- sessions ----

SimulatedMember::Session* SimulatedMember::Find(TrainerRank rank, uint64_t incarnation) {
  const auto found = sessions_.find(rank);
  if (found == sessions_.end() || found->second.incarnation != incarnation) return nullptr;
  return &found->second;
}

// Whether a replacement can be told where the job is: what the predecessor's last attempt has come
// to has been heard, in this epoch, and nothing can be committed without the rank any more.
bool SimulatedMember::KnowsItsStep(TrainerRank rank) const {
  if (!steps_) return true;
  const Attempt open = steps_->open().attempt;
  const auto vacancy = job_->vacancies.find(rank);
  return !job_->reforming && EpochOf(open).value() == epoch_ &&
         (vacancy == job_->vacancies.end() || open > vacancy->second);
}

absl::Status SimulatedMember::NoSession(TrainerRank rank, uint64_t incarnation) const {
  const auto ended = ended_.find(rank);
  if (ended != ended_.end() && ended->second == incarnation) return Unavailable("JOB_ENDED");
  return WithReason(absl::FailedPreconditionError("no such session here"), "INCARNATION_OLD");
}

SimulatedMember::Later<SimulatedMember::Opened> SimulatedMember::Open(TrainerRank rank,
                                                                      bool require) {
  if (!alive_ || leaves_ || epoch_ == 0 || sessions_.contains(rank)) return std::nullopt;
  if (job_) {
    const bool restoring =
        job_->failed.ok() && job_->has_plan() && job_->restore && !job_->restored;
    if (job_->abandoned || restoring) return std::nullopt;
    if (job_->failed.ok() && !KnowsItsStep(rank)) return std::nullopt;
  }
  std::optional<SnapshotId> resume = job_ ? job_->resume : Newest();
  const bool has_state = job_ ? job_->has_state || job_->restore || resume : resume.has_value();
  if (require && !has_state) {
    return WithReason(absl::FailedPreconditionError("nothing to go on from"), "JOB_HAS_NO_STATE");
  }
  if (job_ && !job_->failed.ok()) return job_->failed;
  if (job_ && job_->has_state && !job_->vacancies.contains(rank))
    return Unavailable("TRAINER_LOST");
  if (!job_) job_.emplace().resume = resume;
  Session& session = sessions_[rank];
  session = Session{};
  session.incarnation = ++incarnations_[rank];
  Opened opened;
  opened.incarnation = session.incarnation;
  if (steps_ || job_->restored) {
    opened.at = history_;
  } else if (resume) {
    opened.at = simulation_.invariants.StateOf(*resume);
  }
  session.told = opened.at.step;
  Tell(SessionOf(rank));
  if (!job_->has_plan()) {
    Tell(RegistrationOf(rank));
  }
  return opened;
}

bool SimulatedMember::Restarted() const {
  return job_->has_state && steps_ && steps_->open().attempt > job_->applied_attempt;
}

SimulatedMember::Later<Attempt> SimulatedMember::Attach(TrainerRank rank, uint64_t incarnation) {
  Session* session = Find(rank, incarnation);
  if (session == nullptr) return NoSession(rank, incarnation);
  if (session->refused) return Unavailable("NODE_NOT_READY");
  if (!job_->failed.ok()) return job_->failed;
  // It has been told of another step than the job's.
  if (!session->replied && (session->outdated || session->must_acknowledge)) {
    return Unavailable("GROUP_NOT_READY");
  }
  if (!session->attached) {
    if (!job_->has_plan() || !steps_ || job_->reforming || epoch_ == 0) return std::nullopt;
    const auto vacancy = job_->vacancies.find(rank);
    if (vacancy != job_->vacancies.end() && steps_->open().attempt <= vacancy->second) {
      return std::nullopt;
    }
    session->attached = true;
    session->first_attempt = steps_->open().attempt;
    session->begins = !job_->has_state && job_->restore.has_value();
    job_->vacancies.erase(rank);
    Tell(AttachedOf(rank));
  }
  if (session->begins && !Restarted()) return std::nullopt;
  session->replied = true;
  if (!steps_) simulation_.Fail("a trainer is attached to a job that has not begun");
  return steps_ ? steps_->open().attempt : Attempt(0);
}

absl::StatusOr<StepAnswer> SimulatedMember::Step(const Submission& request, uint64_t incarnation,
                                                 bool wait) {
  Session* session = Find(request.rank, incarnation);
  if (session == nullptr) return NoSession(request.rank, incarnation);
  if (session->must_acknowledge) {
    StepAnswer answer;
    Outcome& outcome = answer.outcome.emplace();
    outcome.kind = OutcomeKind::kRolledBack;
    outcome.to_step = session->must_acknowledge->to_step;
    outcome.epoch = session->must_acknowledge->epoch;
    return answer;
  }
  if (!session->attached || !steps_) {
    return WithReason(absl::FailedPreconditionError("not attached"), "BUFFERS_MISSING");
  }
  absl::StatusOr<StepAnswer> answer = StepAnswer{};
  if (wait) {
    answer = steps_->OnWait(request.rank, request.step, request.attempt);
  } else {
    auto accepted = steps_->OnSubmission(request);
    if (!accepted.ok()) return accepted.status();
    answer = accepted->answer;
    if (!accepted->answer.pending()) ++simulation_.counts.repeated_answers;
    if (accepted->forward) {
      for (SimulatedLane& lane : lanes_) lane.Submitted(request);
      Send(reports_.OnSubmitted(simulation_.Now(), ToProto(request)));
    }
  }
  if (answer.ok() && answer->pending() && !job_->failed.ok()) return job_->failed;
  return answer;
}

SimulatedMember::Later<Attempt> SimulatedMember::Acknowledge(TrainerRank rank, uint64_t incarnation,
                                                             const WayBack& back) {
  Session* session = Find(rank, incarnation);
  if (session == nullptr) return NoSession(rank, incarnation);
  if (session->must_acknowledge) {
    // A late call of an earlier one is no answer to this one.
    if (session->must_acknowledge != back) {
      return WithReason(absl::FailedPreconditionError("the job has gone back"), "ROLLED_BACK");
    }
    session->acknowledged = std::exchange(session->must_acknowledge, std::nullopt);
    if (!job_->reforming) Tell(AttachedOf(rank));
    if (simulation_.chance.Of(20)) {  // once more, when the job may have gone back again
      simulation_.time.After(simulation_.chance.Pick(0, 3'000 * kMillisecond),
                             [this, rank, incarnation, back, boot = boot_] {
                               if (boot_ == boot) (void)Acknowledge(rank, incarnation, back);
                             });
    }
  } else if (session->acknowledged != back) {
    return WithReason(absl::FailedPreconditionError("the job has not gone back"),
                      "STEP_OUT_OF_ORDER");
  }
  if (!job_->failed.ok()) return job_->failed;
  if (!Restarted()) return std::nullopt;
  return steps_->open().attempt;
}

void SimulatedMember::Leave(TrainerRank rank, uint64_t incarnation, const std::string& why) {
  if (Find(rank, incarnation) != nullptr) RemoveSession(rank, why);
}

void SimulatedMember::RemoveSession(TrainerRank rank, const std::string& why) {
  const uint64_t incarnation = sessions_.at(rank).incarnation;
  sessions_.erase(rank);
  if (!job_) return;
  // The coordinator knows whether there is something to wait for.
  // The attempt that ends with it. One that a job has gone back to waits for all ranks instead.
  const bool goes_back = !job_->has_state && job_->restore.has_value();
  job_->vacancies.try_emplace(rank, steps_ && !goes_back ? steps_->open().attempt : Attempt(0));
  job_->gone[rank] = {incarnation, why};
  TellGone(rank, job_->gone[rank]);
  if (simulation_.chance.Of(20)) {  // once more, when its successor may be known already
    simulation_.time.After(simulation_.chance.Pick(0, 800 * kMillisecond),
                           [this, rank, gone = job_->gone[rank], boot = boot_] {
                             if (boot_ == boot) TellGone(rank, gone);
                           });
  }
  if (job_->abandoned && sessions_.empty()) EndJob();
}

// ---- the end ----

void SimulatedMember::CheckTheEnd(bool given_up) const {
  if (given_up) return;
  const History& now = simulation_.invariants.now();
  if (!job_ || !steps_) return simulation_.Fail("a member has no job at the end");
  if (history_.consumed != now.consumed) simulation_.Fail("a member did not hear of all");
  if (steps_->last_committed() != now.step) simulation_.Fail("a member is at another step");
  for (const SimulatedLane& lane : lanes_) {
    if (lane.applied() != now.applied) simulation_.Fail("a commit was not applied once");
    if (lane.publishing()) simulation_.Fail("weights were never published");
  }
}

std::string SimulatedMember::Describe() const {
  std::string text =
      absl::StrCat("; node ", node_.value(), alive_ ? "" : " dead", " epoch ", epoch_);
  if (!job_) return text + " no job";
  absl::StrAppend(&text, job_->has_plan() ? " plan" : "", job_->reforming ? " reforming" : "",
                  job_->failed.ok() ? "" : absl::StrCat(" failed ", ReasonOf(job_->failed)));
  if (steps_) absl::StrAppend(&text, " open ", steps_->open().attempt.value() & 0xffff);
  return text;
}

}  // namespace dmuond::scheduler::testing
