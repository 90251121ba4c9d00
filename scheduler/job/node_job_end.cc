// The end of a job: the group ends it, or it is lost.
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "scheduler/job/node_job.h"
#include "scheduler/job/refusals.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler {

node::Actions NodeJob::AskForEnd(const std::string& why) {
  v1::MemberMessage message;
  message.mutable_end_job()->set_job(job_->name);
  message.mutable_end_job()->set_why(why);
  message.mutable_end_job()->set_node(options_.node);
  Tell(std::move(message));
  return Take();
}

void NodeJob::OnJobEnded(const v1::JobEnded& ended) {
  if (job_ == nullptr || job_->name != ended.job()) return;
  if (ended.reason().empty()) {
    // One that was lost ends with its last session, which has yet to hear of that. And of one that
    // registers, the news of who is here now has crossed with this.
    if (job_->phase == Phase::kFailed || (!planned() && !ranks_.empty())) return;
    return EndJob(ended.why());
  }
  if (ended.reason() == kJobEnded) {
    return EndJob(ended.why(), JobWasEnded(job_->name, LastCommitted(), ended.why()));
  }
  const bool state_lost = ended.reason() == "STATE_LOST";
  // What is wrong with the trainers' weights is told as an error, under its own reason.
  const bool weights = absl::StartsWith(ended.reason(), "WEIGHTS_");
  if (job_->steps.has_value() && !weights) {
    // The outcome of the step that was open, for whoever waits for it.
    const OpenAttempt open = job_->steps->open();
    Decision decision;
    decision.attempt = open.attempt;
    decision.step = open.step;
    decision.verdict = Verdict::kAbort;
    decision.outcome.step = open.step;
    decision.outcome.attempt = open.attempt;
    decision.outcome.reason = state_lost ? OutcomeReason::kStateLost : OutcomeReason::kPeerLost;
    decision.outcome.detail = ended.why();
    decision.outcome.next_attempt = Attempt(open.attempt.value() + 1);
    job_->steps->OnDecision(decision);
  }
  const absl::StatusCode code = weights      ? absl::StatusCode::kFailedPrecondition
                                : state_lost ? absl::StatusCode::kDataLoss
                                             : absl::StatusCode::kUnavailable;
  Abandon(WithMetadata(Error(code, ended.reason(), scheduler::Say(ended.why())),
                       {ended.metadata().begin(), ended.metadata().end()}));
}

void NodeJob::Abandon(const absl::Status& why) {
  Say(node::Note::Level::kError, "job lost",
      {{"step", LastCommitted()}, {"what", std::string(why.message())}});
  if (job_->failed.ok()) job_->failed = why;
  job_->Enter(Phase::kFailed);
  Do(node::StopRestoring{});
  Do(node::KeepSnapshots{});
  // Who waits for weights that nobody will publish is woken by poison, and then asks why.
  Do(node::Poison{});
  Wake();
  if (ranks_.empty()) EndJob("nobody is left in a job that was lost");
}

std::string NodeJob::EndReason(const absl::Status& told) const {
  if (const std::string lost = ReasonOf(WhyNoLanesCome()); !lost.empty()) return lost;
  if (!told.ok()) return ReasonOf(told);
  return std::string(ranks_.vacancies().empty() ? JobEnds::kLeft : "TRAINER_LOST");
}

void NodeJob::EndJob(const std::string& why, const absl::Status& told) {
  ends_.Add(EndReason(told));
  const int64_t durable = job_->snapshot.durable_step().value_or(0);
  Say(node::Note::Level::kInfo, "job ended",
      {{"step", LastCommitted()}, {"durable_step", durable}, {"what", why}});
  const bool lost = (job_->ending && !job_->failed.ok()) || !ranks_.vacancies().empty();
  if (ReasonOf(told) != kJobEnded && lost && job_->has_state && LastCommitted() > durable) {
    Say(node::Note::Level::kError,
        "state lost: it was in memory alone, and a rank did not come back",
        {{"after_step", durable}, {"last_step", LastCommitted()}});
  }
  Do(node::AbandonCopies{"the job has ended"});
  Do(node::StopRestoring{});
  Do(node::KeepSnapshots{});
  Do(node::EndLanes{});
  Do(node::DropMemory{});
  Do(node::ForgetLoads{});
  std::vector<v1::MemberMessage> news;
  for (const auto& [id, session] : ranks_.sessions()) {
    Do(node::SessionEnded{id, told});
    news.emplace_back().set_job(job_->name);
    v1::RankGone& gone = *news.back().mutable_rank_gone();
    gone.set_rank(session.rank);
    gone.set_detail(why);
    gone.set_incarnation(session.incarnation);
  }
  ranks_.Clear();
  job_.reset();
  Wake();
  // The coordinator may have taken one that began as the job ended for the first of the next job. A
  // node that leaves says nothing more: the others wait for its successor.
  if (leaves_) return;
  for (v1::MemberMessage& message : news) Tell(std::move(message));
}

node::Actions NodeJob::EndHere(const std::string& why, const absl::Status& told) {
  EndJob(why, told);
  return Take();
}

}  // namespace dmuond::scheduler
