// Who may open a session, and what is to happen first.
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "scheduler/job/node_job.h"
#include "scheduler/job/refusals.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler {

using Resume = v1::OpenSessionRequest;

std::optional<NodeJob::OpenAnswer> NodeJob::WhyNotOpen(
    const Opening& opening, const std::optional<std::optional<ResumePoint>>& resume) const {
  if (leaves_) {
    return Error(absl::StatusCode::kUnavailable, "DRAINING",
                 scheduler::Say("this daemon is leaving"));
  }
  if (absl::Status may = CheckUser(opening); !may.ok()) return may;
  const bool discards = opening.resume == Resume::RESUME_DISCARD;
  if (discards && job_ != nullptr && job_->name == opening.job && job_->launch != opening.launch) {
    return MustDiscard{};
  }
  if (job_ == nullptr) {
    // Of a session that begins while the group is broken nobody would hear.
    if (epoch_ == 0) {
      return Later{Error(absl::StatusCode::kUnavailable, "GROUP_NOT_FORMED",
                         scheduler::Say("the group of ", Named("nodes", options_.nodes),
                                        " daemons has not formed"))};
    }
    if (!resume.has_value()) return NeedsResume{};
  } else if (restores() || parked()) {
    // What a rank gave with the step that the job goes back to comes with the snapshot.
    return Later{NotReadyToOpen(opening.rank), /*long_wait=*/true};
  } else if (job_->phase == Phase::kFailed || job_->ending || CannotGoBack() ||
             !KnowsItsStep(opening.rank)) {
    // A job that was lost ends with its last session; who starts it again may be faster. One whose
    // group is broken waits for it, and its ranks' replacements do, too.
    return Later{NotReadyToOpen(opening.rank), /*long_wait=*/WaitsForGroup()};
  }
  // The new process may export other memory by the same handle that its predecessor's had.
  if (job_ != nullptr && Unmaps(opening.rank)) return Later{NotReadyToOpen(opening.rank)};
  // What was found counts for the job that it begins.
  const bool found = job_ == nullptr && resume.has_value() && resume->has_value();
  const absl::Status refused = CheckOpen(opening, found ? &**resume : nullptr);
  if (!refused.ok()) {
    // The job ends when the others have left it, too. A script that goes on with its next job may
    // be faster than they are.
    if (HasClosed(opening.rank)) return Later{refused};
    return refused;
  }
  // It is about to end, once its trainers have been told so, each in its step.
  if (!WhyNoLanesCome().ok()) return Later{NotReadyToOpen(opening.rank)};
  return std::nullopt;
}

absl::Status NodeJob::CheckUser(const Opening& opening) const {
  // Whose a job without a plan is, the coordinator knows: it has heard of the first session.
  if (job_ == nullptr || job_->name != opening.job || !planned()) return absl::OkStatus();
  const uint32_t owner = job_->wire.owner_uid();
  if (options_.job_uids.MayTakePart(owner, opening.uid)) return absl::OkStatus();
  return JobOfAnotherUser(opening.job, owner, opening.rank, opening.uid);
}

// Whether a replacement can be told where the job is: what the predecessor's last attempt has come
// to has been heard, in this epoch, and nothing can be committed without the rank any more.
bool NodeJob::KnowsItsStep(int32_t rank) const {
  if (!job_->failed.ok() || !job_->steps.has_value()) return true;
  const Attempt open = job_->steps->open().attempt;
  const RankTable::Vacancy* vacancy = ranks_.VacancyOf(rank);
  return !lanes_come() && EpochOf(open).value() == epoch_ &&
         (vacancy == nullptr || open > vacancy->attempt);
}

// Whether the rank's last trainer has left the job that there is.
bool NodeJob::HasClosed(int32_t rank) const {
  if (job_ == nullptr || ranks_.OfRank(rank) != nullptr) return false;
  const auto gone = ranks_.gone().find(rank);
  return gone != ranks_.gone().end() && gone->second.closed();
}

// It was not prepared for the snapshot that it goes back to, for want of memory, say, and the
// coordinator is about to end it. The snapshot is there, and whoever comes then finds it.
bool NodeJob::CannotGoBack() const { return job_->phase == Phase::kRegistering && job_->goes_back; }

bool NodeJob::WaitsForGroup() const { return job_->broken_since.has_value() && job_->failed.ok(); }

absl::Status NodeJob::NotReadyToOpen(int32_t rank) const {
  const auto refuse = [rank, &job = job_->name](const char* why) {
    return Error(absl::StatusCode::kUnavailable, "GROUP_NOT_READY",
                 scheduler::Say("rank ", Named("rank", rank), " of job '", Named("job", job),
                                "' cannot begin yet: ", Named("awaited", why), "; ask again"));
  };
  if (!WhyNoLanesCome().ok()) {
    return refuse("a job that was lost still has trainers");
  }
  if (CannotGoBack()) return refuse("this node could not make the job's memory, and the job ends");
  if (job_->ending) return refuse("the last state of the job is being saved");
  if (job_->phase == Phase::kParked) {
    return refuse("the job is parked, because its lanes cannot work, and they are tried again");
  }
  if (lanes_come()) return refuse("lanes are being replaced");
  if (WaitsForGroup()) {
    return refuse(
        "the group is broken, and the job waits for it to form anew for --session_linger");
  }
  if (Unmaps(rank)) return refuse("lanes still unmap the memory of the rank's last trainer");
  return refuse("the group has to form anew, or to say what became of the rank's last attempt");
}

// Says whose state it is that the job has here, or in `found`.
std::string NodeJob::WhoseState(int32_t rank, const ResumePoint* found) const {
  const auto of_ranks = [](int32_t ranks) {
    return ranks == 1 ? std::string("a job of one rank")
                      : absl::StrCat("a job of ", ranks, " ranks");
  };
  if (found == nullptr) {
    const RankTable::Vacancy* vacancy = ranks_.VacancyOf(rank);
    return absl::StrCat("in the daemons' memory, of ", of_ranks(job_->world_size),
                        vacancy == nullptr
                            ? ""
                            : absl::StrCat(", whose rank ", rank, " (", vacancy->client,
                                           ") has ended without closing"));
  }
  const v1::SnapshotManifest& manifest = found->manifest;
  const absl::Time written = absl::FromUnixSeconds(manifest.time().seconds());
  const std::string first = manifest.parameters().empty()
                                ? ""
                                : absl::StrCat(", the first '", manifest.parameters(0).name(), "'");
  return absl::StrCat("in the snapshot of ",
                      absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", written, absl::UTCTimeZone()), ", of ",
                      of_ranks(manifest.world_size()), " (parameters: ", manifest.parameters_size(),
                      first, ")");
}

// `found`: a snapshot from which the job may begin; null where there is none, or there is a job.
absl::Status NodeJob::CheckOpen(const Opening& opening, const ResumePoint* found) const {
  const bool has_state = job_ == nullptr ? found != nullptr : HasOrGetsState();
  const int64_t last_committed = found != nullptr ? found->step() : LastCommitted();
  if (job_ != nullptr && job_->name != opening.job) return OtherJob(job_->name, opening.job);
  if (job_ != nullptr && job_->world_size != opening.world_size) {
    return WorldDiffers(job_->name, job_->world_size, opening.rank, opening.world_size);
  }
  if (const RankTable::Session* other = ranks_.OfRank(opening.rank); other != nullptr) {
    return RankTwice(opening.job, opening.rank, other->pid, other->client);
  }
  if (job_ != nullptr && job_->planned.plan != nullptr) {
    const int32_t home = job_->planned.inputs->layout.trainers[opening.rank].node.value();
    if (home != options_.node) return RankMoved(opening.job, opening.rank, home, options_.node);
  }
  if (has_state && opening.resume != Resume::RESUME_IF_PRESENT &&
      opening.resume != Resume::RESUME_REQUIRE) {
    return opening.resume == Resume::RESUME_DISCARD
               ? LaunchHasState(opening.job, opening.launch, last_committed)
               : JobHasState(opening.job, last_committed, WhoseState(opening.rank, found));
  }
  if (!has_state && opening.resume == Resume::RESUME_REQUIRE) return JobHasNoState(opening.job);
  if (job_ != nullptr && !job_->failed.ok()) return job_->failed;
  if (job_ != nullptr && job_->has_state && ranks_.VacancyOf(opening.rank) == nullptr) {
    // Every rank has pushed to make the state: this one has closed its session since.
    return Error(
        absl::StatusCode::kUnavailable, "TRAINER_LOST",
        scheduler::Say("rank ", Named("rank", opening.rank), " has left job '",
                       Named("job", opening.job), "' at step ",
                       Named("last_committed_step", job_->steps->last_committed().value()),
                       ": a job ends when a rank closes its session; start it again when the other "
                       "ranks have ended, or end it now: `dmuonctl job end ",
                       opening.job, "`"));
  }
  return absl::OkStatus();
}

NodeJob::OpenAnswer NodeJob::Open(TimePoint /*now*/, const Opening& opening,
                                  const std::optional<std::optional<ResumePoint>>& resume,
                                  node::Actions& actions) {
  if (auto why = WhyNotOpen(opening, resume); why.has_value()) return *std::move(why);
  const bool begins = job_ == nullptr;
  const bool discards = opening.resume == Resume::RESUME_DISCARD;
  const std::optional<ResumePoint> found =
      begins && resume.has_value() ? *resume : std::optional<ResumePoint>();
  const bool has_state = begins ? found.has_value() : HasOrGetsState();
  if (begins) {
    BeginJob(opening.job, opening.world_size);
    job_->launch = opening.launch;
    job_->owner_uid = opening.owner_uid;
    if (found.has_value()) job_->snapshot.set_durable_step(found->step());
    job_->resume = found;
    ++plan_version_;
    if (!options_.snapshots) {
      Say(node::Note::Level::kWarn,
          "no snapshots are made: the job's state goes with this daemon (--snapshot_dir)");
    }
  }
  RankTable::Session opened;
  opened.id = opening.id;
  opened.rank = opening.rank;
  opened.pid = opening.pid;
  opened.uid = opening.uid;
  opened.end_is_seen = opening.end_is_seen;
  opened.client = opening.client;
  opened.home_lane = opening.home_lane;
  opened.discards = discards;
  const RankTable::Session& session = ranks_.Open(std::move(opened));
  Tell(NewsOfSession(session));
  Opened answer;
  answer.incarnation = session.incarnation;
  answer.job_incarnation = job_->wire.job_incarnation();
  answer.has_state = has_state;
  answer.last_committed = LastCommitted();
  answer.durable_step = job_->snapshot.durable_step();
  answer.trainer_state = TrainerStateOf(opening.rank);
  answer.begins_job = begins;
  actions = Take();
  return answer;
}

node::Actions NodeJob::Discard(const Opening& opening) {
  v1::MemberMessage message;
  v1::EndJob& end = *message.mutable_end_job();
  end.set_job(job_->name);
  end.set_why(absl::StrCat("rank ", opening.rank, " begins it anew"));
  end.set_node(options_.node);
  v1::RankSession& discard = *end.mutable_discard();
  discard.set_rank(opening.rank);
  discard.set_node(options_.node);
  discard.set_job(job_->name);
  discard.set_discard(true);
  discard.set_launch(opening.launch);
  discard.set_uid(opening.uid);
  Tell(std::move(message));
  return Take();
}

}  // namespace dmuond::scheduler
