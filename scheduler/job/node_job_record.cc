// What a successor of this process needs of the job, and the job made of it.
#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "scheduler/convert/convert.h"
#include "scheduler/convert/registrations.h"
#include "scheduler/job/impossible.h"
#include "scheduler/job/node_job.h"

namespace dmuond::scheduler {
namespace {

using Kind = RecordPart::Kind;

void WriteSteps(const StepMember::State& state, v1::RecordedSteps& out) {
  out.set_last_committed(state.last_committed.value());
  *out.mutable_open() = ToProto(state.open);
  for (const StepMember::Decided& decided : state.decided) {
    v1::RecordedSteps::Decided& entry = *out.add_decided();
    *entry.mutable_decision() = ToProto(decided.decision);
    entry.set_open_step(decided.open_step.value());
  }
  for (const auto& [lane, norms] : state.gathered) out.add_gathered(lane.value());
}

absl::StatusOr<StepMember::State> ReadSteps(const JobRecord& record) {
  const v1::RecordedSteps& steps = record.progress().steps();
  StepMember::State state;
  state.last_committed = StepId(steps.last_committed());
  state.open = FromProto(steps.open());
  for (const v1::RecordedSteps::Decided& entry : steps.decided()) {
    absl::StatusOr<Decision> decision = FromProto(entry.decision());
    if (!decision.ok()) return decision.status();
    state.decided.push_back({*std::move(decision), StepId(entry.open_step())});
  }
  for (const int32_t lane : steps.gathered()) state.gathered[LaneIndex(lane)];
  for (const v1::RecordedNorms& norms : record.norms()) {
    const auto lane = state.gathered.find(LaneIndex(norms.lane()));
    if (lane == state.gathered.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("norms of lane ", norms.lane(), ", which has not gathered"));
    }
    absl::StatusOr<std::vector<UnitNorm>> of_lane = FromProto(norms.norms());
    if (!of_lane.ok()) return of_lane.status();
    lane->second = *std::move(of_lane);
  }
  for (const v1::RankSubmitted& submitted : record.submissions()) {
    absl::StatusOr<Submission> submission = FromProto(submitted);
    if (!submission.ok()) return submission.status();
    const TrainerRank rank = submission->rank;
    state.submissions[rank] = *std::move(submission);
  }
  return state;
}

}  // namespace

// Of the open attempt, by an accepted submission: what older ones have left behind does not count.
const std::string* NodeJob::SubmittedState(int32_t rank) const {
  if (!job_->steps.has_value() || !job_->steps->submitted(TrainerRank(rank))) return nullptr;
  const auto found = job_->submitted_states.find(rank);
  if (found == job_->submitted_states.end()) return nullptr;
  const TrainerState& state = found->second;
  return state.attempt == job_->steps->open().attempt && !state.bytes.empty() ? &state.bytes
                                                                              : nullptr;
}

std::vector<RecordPart> NodeJob::RecordParts() const {
  std::vector<RecordPart> parts;
  const std::vector<RecordPart>& ranks = ranks_.Parts();
  constexpr size_t kFew = 16;
  parts.reserve(kFew + ranks.size() + 3 * ranks_.sessions().size() +
                static_cast<size_t>(options_.lanes));
  parts.push_back({Kind::kProgress, 0, progress_version_});
  if (job_ != nullptr) parts.push_back({Kind::kPlan, 0, plan_version_});
  parts.insert(parts.end(), ranks.begin(), ranks.end());
  if (job_ == nullptr) return parts;
  parts.push_back({Kind::kSnapshot, 0, (job_->number << 32) + job_->snapshot.version()});
  if (job_->steps.has_value()) {
    const StepMember::State& steps = job_->steps->state();
    const uint64_t attempt = steps.open.attempt.value();
    for (const auto& [rank, submission] : steps.submissions) {
      parts.push_back({Kind::kSubmission, static_cast<uint64_t>(rank.value()), attempt});
    }
    // A vote has taken them all along.
    if (!job_->steps->voted()) {
      for (const auto& [lane, norms] : steps.gathered) {
        parts.push_back({Kind::kNorms, static_cast<uint64_t>(lane.value()), attempt});
      }
    }
  }
  const auto states = static_cast<std::ptrdiff_t>(parts.size());
  for (const auto& [rank, state] : job_->trainer_states) {
    if (state.bytes.empty()) continue;
    parts.push_back({Kind::kTrainerState, static_cast<uint64_t>(rank), state.attempt.value()});
  }
  for (const auto& [rank, state] : job_->submitted_states) {
    if (state.bytes.empty() || SubmittedState(rank) == nullptr) continue;
    parts.push_back({Kind::kTrainerState, static_cast<uint64_t>(rank), state.attempt.value()});
  }
  std::sort(parts.begin() + states, parts.end());
  return parts;
}

void NodeJob::WritePart(const RecordPart& part, JobRecord& record) const {
  switch (part.kind) {
    case Kind::kProgress:
      record.set_format(kJobRecordFormat);
      return WriteProgress(*record.mutable_progress());
    case Kind::kPlan:
      return WritePlan(*record.mutable_plan());
    case Kind::kRanks:
    case Kind::kSession:
    case Kind::kRegistration:
    case Kind::kAttachment:
      return ranks_.WritePart(part, record);
    case Kind::kSnapshot:
      return job_->snapshot.ToRecord(*record.mutable_snapshot());
    case Kind::kSubmission:
      *record.add_submissions() =
          ToProto(job_->steps->state().submissions.at(TrainerRank(static_cast<int32_t>(part.of))));
      return;
    case Kind::kNorms: {
      v1::RecordedNorms& out = *record.add_norms();
      out.set_lane(static_cast<int32_t>(part.of));
      *out.mutable_norms() = ToProto(job_->steps->state().gathered.at(LaneIndex(out.lane())));
      return;
    }
    case Kind::kTrainerState: {
      v1::RecordedTrainerState& out = *record.add_trainer_states();
      out.set_rank(static_cast<int32_t>(part.of));
      out.set_attempt(part.version);
      const auto kept = job_->trainer_states.find(out.rank());
      out.set_state(kept != job_->trainer_states.end() &&
                            kept->second.attempt.value() == part.version
                        ? kept->second.bytes
                        : job_->submitted_states.at(out.rank()).bytes);
      return;
    }
  }
}

void NodeJob::WriteProgress(v1::RecordedProgress& out) const {
  out.set_epoch(epoch_);
  out.set_halted(halted_);
  out.set_halted_attempt(halted_attempt_.value());
  out.set_leaves(leaves_);
  out.set_jobs(jobs_);
  if (job_ == nullptr) return;
  out.set_phase(static_cast<v1::RecordedProgress::Phase>(job_->phase));
  out.set_number(job_->number);
  out.set_prepared(job_->planned.plan != nullptr);
  out.set_host_copies(job_->host_copies);
  if (!job_->failed.ok()) *out.mutable_failed() = ToRecord(job_->failed);
  out.set_has_state(job_->has_state);
  out.set_goes_back(job_->goes_back);
  out.set_state_is_void(job_->state_is_void);
  out.set_over_old_memory(job_->over_old_memory);
  out.set_lanes_wanted(job_->lanes_wanted || job_->lane_retry.has_value());
  out.set_ending(job_->ending);
  *out.mutable_back() = ToRecord(job_->back);
  out.set_restored(job_->restored);
  out.set_broken(job_->broken_since.has_value());
  out.set_applied_attempt(job_->applied_attempt);
  out.set_published_attempt(job_->published_attempt);
  out.set_publishing_attempt(job_->publishing_attempt);
  if (job_->planned.plan != nullptr) job_->lanes.ToRecord(*out.mutable_lanes());
  if (job_->steps.has_value()) WriteSteps(job_->steps->state(), *out.mutable_steps());
}
static_assert(static_cast<int>(NodeJob::Phase::kNone) == v1::RecordedProgress::PHASE_UNSPECIFIED);
static_assert(static_cast<int>(NodeJob::Phase::kRegistering) ==
              v1::RecordedProgress::PHASE_REGISTERING);
static_assert(static_cast<int>(NodeJob::Phase::kFailed) == v1::RecordedProgress::PHASE_FAILED);
static_assert(static_cast<int>(NodeJob::Phase::kParked) == v1::RecordedProgress::PHASE_PARKED);

void NodeJob::WritePlan(v1::RecordedPlan& out) const {
  out.set_job(job_->name);
  out.set_world_size(job_->world_size);
  out.set_launch(job_->launch);
  if (job_->owner_uid.has_value()) out.set_owner_uid(*job_->owner_uid);
  *out.mutable_inputs() = job_->wire;
  if (!job_->resume.has_value()) return;
  *out.mutable_resume() = job_->resume->manifest;
  for (const auto& [rank, bytes] : job_->resume->trainers) {
    v1::RecordedTrainerState& state = *out.add_resume_states();
    state.set_rank(rank.value());
    state.set_state(bytes);
  }
}

absl::StatusOr<NodeJob> NodeJob::FromRecord(const NodeJobOptions& options, const JobRecord& record,
                                            PlannedJob planned, TimePoint now) {
  const v1::RecordedProgress& progress = record.progress();
  NodeJob node(options);
  node.epoch_ = progress.epoch();
  node.halted_ = progress.halted();
  node.halted_attempt_ = Attempt(progress.halted_attempt());
  node.leaves_ = progress.leaves();
  node.jobs_ = progress.jobs();
  absl::StatusOr<RankTable> ranks = RankTable::FromRecord(record);
  if (!ranks.ok()) return ranks.status();
  node.ranks_ = *std::move(ranks);
  if (progress.phase() == v1::RecordedProgress::PHASE_UNSPECIFIED) return node;
  if (!v1::RecordedProgress::Phase_IsValid(progress.phase())) {
    return absl::InvalidArgumentError(
        absl::StrCat("RecordedProgress.phase has the unknown value ", progress.phase()));
  }
  node.job_ = std::make_unique<Job>();
  Job& job = *node.job_;
  job.name = record.plan().job();
  job.world_size = record.plan().world_size();
  job.launch = record.plan().launch();
  if (record.plan().has_owner_uid()) job.owner_uid = record.plan().owner_uid();
  job.wire = record.plan().inputs();
  if (record.plan().has_resume()) {
    job.resume.emplace().manifest = record.plan().resume();
    for (const v1::RecordedTrainerState& state : record.plan().resume_states()) {
      job.resume->trainers[TrainerRank(state.rank())] = state.state();
    }
  }
  job.phase = static_cast<Phase>(progress.phase());
  job.number = progress.number();
  job.host_copies = progress.host_copies();
  job.failed = StatusOf(progress.failed());
  job.has_state = progress.has_state();
  job.goes_back = progress.goes_back();
  job.state_is_void = progress.state_is_void();
  job.over_old_memory = progress.over_old_memory();
  job.lanes_wanted = progress.lanes_wanted();
  job.ending = progress.ending();
  job.back = RollbackOf(progress.back());
  job.restored = progress.restored();
  if (progress.broken()) job.broken_since = now;
  job.applied_attempt = progress.applied_attempt();
  job.published_attempt = progress.published_attempt();
  job.publishing_attempt = progress.publishing_attempt();
  absl::StatusOr<SnapshotPart> snapshot = SnapshotPart::FromRecord(options.node, record.snapshot());
  if (!snapshot.ok()) return snapshot.status();
  job.snapshot = *std::move(snapshot);
  if (progress.prepared()) {
    if (planned.plan == nullptr) {
      return absl::InvalidArgumentError("the job was prepared, and its plan is not given");
    }
    job.planned = std::move(planned);
    absl::StatusOr<LaneSet> lanes = LaneSet::FromRecord(
        LaneId(options.node * options.lanes), options.lanes, options.watch, progress.lanes());
    if (!lanes.ok()) return lanes.status();
    job.lanes = *std::move(lanes);
  } else if (job.phase >= Phase::kStarting && job.phase != Phase::kFailed) {
    return absl::InvalidArgumentError(
        absl::StrCat("a job that is ", Name(job.phase), " without having been prepared"));
  }
  if (progress.has_steps()) {
    if (!progress.prepared()) {
      return absl::InvalidArgumentError("a job that has steps without having been prepared");
    }
    absl::StatusOr<StepMember::State> steps = ReadSteps(record);
    if (!steps.ok()) return steps.status();
    job.steps.emplace(node.LocalRanks(), options.lanes, *std::move(steps));
  }
  for (const v1::RecordedTrainerState& wire : record.trainer_states()) {
    const Attempt attempt(wire.attempt());
    const bool submitted = job.steps.has_value() && attempt == job.steps->open().attempt &&
                           job.steps->submitted(TrainerRank(wire.rank()));
    (submitted ? job.submitted_states : job.trainer_states)[wire.rank()] = {attempt, wire.state()};
  }
  return node;
}

}  // namespace dmuond::scheduler
