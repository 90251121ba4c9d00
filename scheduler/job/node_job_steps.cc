// Steps and pushes on one node: submissions, what lanes have gathered and published, decisions.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/convert/convert.h"
#include "scheduler/job/node_job.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler {
namespace {

// An attempt may end while a trainer is between steps: the one that is open now is for it too.
absl::Status WithOpenAttempt(const absl::Status& status, Attempt open) {
  if (ReasonOf(status) != "ATTEMPT_OUT_OF_ORDER") return status;
  Metadata metadata = MetadataOf(status);
  metadata.emplace_back("next_attempt", absl::StrCat(open.value()));
  return WithMetadata(status, metadata);
}

StepAnswer RolledBack(const Rollback& back, StepId step, Attempt attempt) {
  const StepId to(back.to_step);
  StepAnswer answer;
  Outcome& outcome = answer.outcome.emplace();
  outcome.kind = OutcomeKind::kRolledBack;
  if (!back.asked) outcome.reason = OutcomeReason::kPeerLost;
  outcome.step = step;
  outcome.attempt = attempt;
  outcome.to_step = to;
  outcome.epoch = GroupEpoch(back.epoch);
  outcome.durable_step = to;
  outcome.detail = absl::StrCat("the job has gone back to step ", to.value());
  return answer;
}

}  // namespace

absl::Status NodeJob::CheckAttached(const RankTable::Session& session) const {
  if (session.mapped() && job_->steps.has_value()) return absl::OkStatus();
  return Error(
      absl::StatusCode::kFailedPrecondition, "BUFFERS_MISSING",
      scheduler::Say("rank ", Named("rank", session.rank), " must attach its buffers first"));
}

absl::Status NodeJob::RolledBackError(int32_t rank, const Rollback& back) {
  return Error(absl::StatusCode::kFailedPrecondition, "ROLLED_BACK",
               scheduler::Say("the job has gone back to step ", Named("to_step", back.to_step),
                              " in epoch ", Named("epoch", back.epoch), " (",
                              Named("cause", back.asked ? "LOAD_SNAPSHOT" : "PEER_LOST"),
                              "): rank ", Named("rank", rank), " must acknowledge it first"));
}

absl::Status NodeJob::CheckNotRolledBack(const RankTable::Session& session) {
  if (!session.must_acknowledge.has_value()) return absl::OkStatus();
  return RolledBackError(session.rank, *session.must_acknowledge);
}

absl::StatusOr<StepAnswer> NodeJob::Submit(uint64_t id, const Submission& submission,
                                           const std::string& trainer_state,
                                           node::Actions& actions) {
  const RankTable::Session& session = *ranks_.Find(id);
  if (session.must_acknowledge.has_value()) {
    return RolledBack(*session.must_acknowledge, submission.step, submission.attempt);
  }
  if (absl::Status attached = CheckAttached(session); !attached.ok()) return attached;
  if (halted_ && submission.step > job_->steps->last_committed()) {
    return Error(absl::StatusCode::kUnavailable, "DRAINING",
                 scheduler::Say("this daemon is leaving"));
  }
  absl::StatusOr<StepMember::Accepted> accepted = job_->steps->OnSubmission(submission);
  if (!accepted.ok()) return WithOpenAttempt(accepted.status(), job_->steps->open().attempt);
  if (accepted->forward) {
    job_->submitted_states[session.rank] = {submission.attempt, trainer_state};
    v1::MemberMessage message;
    v1::RankSubmitted& submitted = *message.mutable_reports()->add_submitted();
    submitted = ToProto(submission);
    submitted.set_incarnation(session.incarnation);
    v1::LaneCommand command;
    *command.mutable_submitted() = submitted;
    // A trainer marks buckets with absent gradients when its submission is answered: lanes must
    // know by then what is absent, or they add up what lies there.
    const bool may_wait = submission.absent.empty() && !job_->steps->all_submitted();
    ToReadyLanes(command, may_wait);
    Tell(std::move(message));
    ++submitted_version_;
    actions = TakeUnrecorded();
  }
  return accepted->answer;
}

absl::StatusOr<StepAnswer> NodeJob::AnswerOf(uint64_t id, StepId step, Attempt attempt) const {
  const RankTable::Session& session = *ranks_.Find(id);
  if (session.must_acknowledge.has_value()) {
    return RolledBack(*session.must_acknowledge, step, attempt);
  }
  absl::StatusOr<StepAnswer> answer = StepAnswer{};
  if (job_->steps.has_value()) {
    answer = job_->steps->OnWait(TrainerRank(session.rank), step, attempt);
    if (!answer.ok()) answer = WithOpenAttempt(answer.status(), job_->steps->open().attempt);
  }
  // Also to who has handed nothing in, and asks why no weights come.
  if ((!answer.ok() || answer->pending()) && !job_->failed.ok()) return job_->failed;
  return answer;
}

// ---- attempts ----

void NodeJob::BeginSteps(StepId last_committed) {
  if (job_->steps.has_value()) return;
  job_->steps.emplace(LocalRanks(), options_.lanes, last_committed);
  job_->goes_back = false;
}

std::vector<TrainerRank> NodeJob::LocalRanks() const {
  std::vector<TrainerRank> local;
  for (const Trainer& trainer : job_->planned.inputs->layout.trainers) {
    if (trainer.node.value() == options_.node) local.push_back(trainer.rank);
  }
  return local;
}

void NodeJob::OnOpenAttempt(TimePoint now, const v1::OpenAttempt& open) {
  if (job_ == nullptr || job_->planned.plan == nullptr || job_->phase == Phase::kFailed) return;
  // While lanes come, this is the attempt in which a job that is given up tells its trainers so.
  if (!lanes_come()) job_->Enter(Phase::kRunning);
  BeginSteps(StepId(open.step() - 1));
  job_->steps->OnOpen(FromProto(open));
  job_->figures.OnOpen(now, job_->steps->open().attempt);
  v1::LaneCommand command;
  *command.mutable_arm() = open;
  ToReadyLanes(command);
  Wake();
}

void NodeJob::OnGoes(const v1::Goes& goes) {
  for (int32_t rail = 0; rail < options_.lanes; ++rail) {
    v1::LaneCommand command;
    for (const v1::Go& go : goes.goes()) {
      if (go.rail() == rail) *command.mutable_goes()->add_goes() = go;
    }
    if (!command.has_goes()) continue;
    *command.mutable_goes()->mutable_absent() = goes.absent();
    ToLane(LaneIndex(rail), std::move(command));
  }
}

// A decision that is known is told again when lanes are new: those whose predecessors have not come
// to the end of a commit finish it.
void NodeJob::FinishAgain(const v1::Decision& wire, const Decision& decision) {
  if (decision.verdict != Verdict::kCommit || job_->published_attempt >= decision.attempt.value()) {
    return;
  }
  if (decision.kind == AttemptKind::kLoad) return Do(node::ApplyLoad{decision.attempt.value()});
  node::CommandLanes order;
  for (size_t i = 0; i < job_->lanes.size(); ++i) {
    const LaneIndex lane(static_cast<int32_t>(i));
    if (job_->lanes[lane].published_attempt < decision.attempt.value()) {
      order.lanes.push_back(lane);
    }
  }
  *order.command.mutable_decision() = wire;
  Do(std::move(order));
}

void NodeJob::OnDecision(TimePoint now, const v1::Decision& wire) {
  if (job_ == nullptr || !job_->steps.has_value()) return;
  absl::StatusOr<Decision> decision = FromProto(wire);
  if (!decision.ok()) {
    Say(node::Note::Level::kError, "a decision that cannot be read",
        {{"step", wire.step()},
         {"what", decision.status().ToString(absl::StatusToStringMode::kWithNoExtraData)}});
    return;
  }
  if (decision->attempt < job_->steps->open().attempt) return FinishAgain(wire, *decision);
  const bool commit = decision->verdict == Verdict::kCommit;
  if (commit && decision->kind == AttemptKind::kLoad) {
    Do(node::ApplyLoad{decision->attempt.value()});
  }
  v1::LaneCommand command;
  *command.mutable_decision() = wire;
  ToReadyLanes(command);
  if (commit && decision->kind == AttemptKind::kLoad) {
    v1::LaneCommand republish;
    republish.mutable_republish()->set_attempt(wire.attempt());
    ToReadyLanes(republish);
  }
  const bool anybody_waits = std::any_of(
      ranks_.sessions().begin(), ranks_.sessions().end(),
      [&](const auto& entry) { return job_->steps->submitted(TrainerRank(entry.second.rank)); });
  job_->steps->OnDecision(*decision);
  job_->figures.OnOpen(now, job_->steps->open().attempt);
  if (commit || decision->verdict == Verdict::kSkip) {
    job_->applied_attempt = decision->attempt.value();
    job_->figures.progressed = now;
    if (decision->kind == AttemptKind::kStep) {
      job_->figures.gradient_norm = decision->outcome.gradient_norm;
      job_->figures.clip_coefficient = decision->outcome.clip_coefficient;
      if (commit) ++job_->figures.committed_steps;
      for (auto& [rank, submitted] : job_->submitted_states) {
        if (submitted.attempt == decision->attempt) {
          std::swap(job_->trainer_states[rank], submitted);
        }
      }
    }
  }
  switch (decision->verdict) {
    case Verdict::kCommit:
      job_->has_state = true;
      break;
    case Verdict::kSkip:
      ++job_->figures.skipped_steps;
      Say(node::Note::Level::kWarn, "step skipped",
          {{"step", wire.step()}, {"what", decision->outcome.detail}});
      break;
    case Verdict::kAbort:
    case Verdict::kRefuse:
      if (!WhyNoLanesCome().ok()) {
        // Weights of the last step may not have come, and no lane will publish them.
        Do(node::Poison{});
      } else if (!anybody_waits) {
        // An attempt that nobody here has submitted ends without loss: a rank that closes, say.
        break;
      }
      ++job_->figures.aborted_attempts;
      Say(node::Note::Level::kWarn, "attempt aborted",
          {{"step", wire.step()},
           {"what", decision->verdict == Verdict::kRefuse ? decision->refuse_message
                                                          : decision->outcome.detail}});
      break;
  }
  Wake();
}

void NodeJob::OnRepublish(const v1::Republish& republish) {
  if (job_ == nullptr || job_->planned.plan == nullptr || job_->phase == Phase::kFailed) return;
  // The link may have broken before the first attempt of a job that went back was heard of.
  BeginSteps(StepId(republish.step()));
  // The state as it was, under another attempt.
  job_->snapshot.OnRepublished(job_->applied_attempt, republish.attempt(),
                               /*from_snapshot=*/job_->restored && job_->applied_attempt == 0);
  job_->has_state = true;
  job_->applied_attempt = republish.attempt();
  v1::LaneCommand command;
  command.mutable_republish()->set_attempt(republish.attempt());
  ToReadyLanes(command);
  Wake();
}

// ---- what lanes have come to ----

void NodeJob::OnGathered(LaneIndex lane, const v1::LaneReport::Gathered& gathered) {
  if (!job_->steps.has_value()) return;
  job_->lanes.OnGathered(lane, gathered.attempt(),
                         {gathered.non_finite().begin(), gathered.non_finite().end()});
  absl::StatusOr<std::vector<UnitNorm>> norms = FromProto(gathered.norms());
  if (!norms.ok()) {  // the coordinator says which unit's it lacks
    Say(node::Note::Level::kError, "norms of a lane cannot be read",
        {{"lane", lane.value()}, {"what", std::string(norms.status().message())}});
    norms.emplace();
  }
  const Attempt attempt(gathered.attempt());
  auto of_node = job_->steps->OnGathered(attempt, lane, *std::move(norms));
  if (!of_node.has_value()) return;
  TellVote(attempt, *of_node);
  job_->figures.norms = std::make_shared<const std::vector<UnitNorm>>(*std::move(of_node));
}

void NodeJob::TellVote(Attempt attempt, const std::vector<UnitNorm>& norms) {
  v1::MemberMessage message;
  v1::Vote& vote = *message.mutable_vote();
  vote.set_attempt(attempt.value());
  vote.set_node(options_.node);
  vote.set_plan_digest(job_->planned.plan->digest);
  *vote.mutable_norms() = ToProto(norms);
  for (size_t i = 0; i < job_->lanes.size(); ++i) {
    const std::vector<int32_t>& units = job_->lanes[LaneIndex(static_cast<int32_t>(i))].non_finite;
    vote.mutable_non_finite()->Add(units.begin(), units.end());
  }
  Tell(std::move(message));
}

void NodeJob::OnPublished(LaneIndex lane, const v1::LaneReport::Published& published) {
  job_->lanes.OnPublished(lane, published.attempt());
  if (published.attempt() > job_->publishing_attempt) {
    job_->publishing_attempt = published.attempt();
    job_->publishing.Clear();
    job_->publishing_updates.clear();
  }
  for (const v1::LaneReport::UnitUpdate& update : published.updates()) {
    job_->publishing_updates.push_back({UnitId(update.unit()), update.squares()});
  }
  const v1::StepTiming& timing = published.timing();
  v1::StepTiming& slowest = job_->publishing;
  slowest.set_collect_us(std::max(slowest.collect_us(), timing.collect_us()));
  slowest.set_decide_us(std::max(slowest.decide_us(), timing.decide_us()));
  slowest.set_update_us(std::max(slowest.update_us(), timing.update_us()));
  slowest.set_publish_us(std::max(slowest.publish_us(), timing.publish_us()));
  slowest.set_quiet_us(std::max(slowest.quiet_us(), timing.quiet_us()));
  if (timing.sum_us() > slowest.sum_us()) {
    slowest.set_sum_us(timing.sum_us());
    slowest.set_sum_bytes(timing.sum_bytes());
  }
  slowest.set_rail_bytes(slowest.rail_bytes() + timing.rail_bytes());
  slowest.set_norm_us(std::max(slowest.norm_us(), timing.norm_us()));
  if (timing.copy_us() > slowest.copy_us()) {
    slowest.set_copy_us(timing.copy_us());
    slowest.set_copy_bytes(timing.copy_bytes());
  }
  const uint64_t everywhere = job_->lanes.published_attempt();
  if (everywhere <= job_->published_attempt) return;
  job_->published_attempt = everywhere;
  job_->figures.OnPublished(job_->steps ? job_->steps->last_committed().value() : 0,
                            job_->publishing);
  if (!job_->publishing_updates.empty()) {
    job_->figures.updates =
        std::make_shared<const std::vector<UnitUpdate>>(std::move(job_->publishing_updates));
    job_->publishing_updates.clear();
  }
  Do(node::DropLoads{job_->published_attempt});
}

}  // namespace dmuond::scheduler
