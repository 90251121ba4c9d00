#include "server/lane/engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/status_macros.h"
#include "scheduler/convert/convert.h"
#include "server/common/log.h"
#include "server/lane/unit_io.h"

namespace dmuond::server::lane {

using scheduler::AttemptKind;
using scheduler::Verdict;

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const LaneJob& job, Channel& channel,
                                                       kernels::Device& device, PeerGroup* group) {
  std::unique_ptr<Engine> engine(new Engine(job, channel, device, group));
  for (auto* place :
       {&engine->collect_stream_, &engine->update_stream_, &engine->snapshot_stream_}) {
    ASSIGN_OR_RETURN(*place, device.CreateStream());
  }
  ASSIGN_OR_RETURN(engine->slots_, Slots::Create(job));
  ASSIGN_OR_RETURN(engine->collector_, Collector::Create(job, engine->trainers_, engine->rail_,
                                                         device, *engine->collect_stream_));
  ASSIGN_OR_RETURN(engine->updater_,
                   Updater::Create(job, *engine->slots_, device, *engine->update_stream_));
  ASSIGN_OR_RETURN(engine->publisher_,
                   Publisher::Create(job, engine->trainers_, engine->rail_, device));
  ASSIGN_OR_RETURN(engine->snapshot_,
                   SnapshotCopy::Create(job, *engine->slots_, device, *engine->snapshot_stream_));
  engine->check_ = std::make_unique<ExtractCheck>(job, *engine->slots_, engine->trainers_, device,
                                                  *engine->snapshot_stream_);
  engine->written_to_.assign(job.local.size(), 0);
  engine->writing_to_ = engine->written_to_;
  return engine;
}

// What the device still does with a trainer's memory ends before that is unmapped.
absl::Status Engine::LeaveTrainersMemory() {
  absl::Status idle = collector_->Synchronize();
  idle.Update(publisher_->Synchronize());
  return idle;
}

absl::Status Engine::OnAttach(const v1::LaneCommand::AttachTrainer& attach,
                              const std::vector<wire::UniqueFd>& fds) {
  RETURN_IF_ERROR(LeaveTrainersMemory());
  const absl::Status status = trainers_.Attach(attach, fds);
  v1::LaneReport report;
  v1::LaneReport::Attached& attached = *report.mutable_attached();
  attached.set_rank(attach.rank());
  attached.set_incarnation(attach.incarnation());
  if (!status.ok()) attached.set_error(std::string(status.message()));
  fault::FaultPoint("lane.attached");
  return channel_.Send(report);
}

absl::Status Engine::OnDetach(const v1::LaneCommand::DetachTrainer& detach) {
  RETURN_IF_ERROR(LeaveTrainersMemory());
  trainers_.Detach(detach.rank(), detach.incarnation());
  if (detach.rank() >= 0 && detach.rank() < static_cast<int32_t>(job_.local.size()) &&
      trainers_.Find(detach.rank()) == nullptr) {
    collector_->OnDetach(detach.rank());
  }
  v1::LaneReport report;
  report.mutable_detached()->set_rank(detach.rank());
  report.mutable_detached()->set_incarnation(detach.incarnation());
  return channel_.Send(report);
}

absl::Status Engine::OnOpen(const scheduler::OpenAttempt& open) {
  opened_ = open;
  return absl::OkStatus();
}

absl::Status Engine::OnSubmitted(const scheduler::Submission& submission) {
  if (submission.withdraw) return absl::OkStatus();  // its attempt is about to be aborted
  if (submission.rank.value() < 0 ||
      submission.rank.value() >= static_cast<int32_t>(job_.local.size())) {
    return absl::InternalError(absl::StrCat("submission of trainer ", submission.rank.value()));
  }
  if (collector_->armed() && submission.attempt == collector_->attempt()) {
    collector_->OnSubmission(submission);
    times_.last_submit = Clock::now();
  } else if (!collector_->armed() || submission.attempt > collector_->attempt()) {
    submissions_.push_back(submission);
  }
  return absl::OkStatus();
}

absl::Status Engine::OnGo(const scheduler::Go& go) {
  if (go.rail != job_.program.rail) return absl::OkStatus();
  for (const scheduler::BucketRun& run : go.buckets) {
    if (run.first.value() >= 0 && run.end().value() <= job_.buckets()) continue;
    return absl::InternalError(
        absl::StrCat("GO for ", run.count, " buckets from ", run.first.value(), " on"));
  }
  if (go.operation == scheduler::RailOperation::kPublish) return publisher_->OnGo(go);
  if (!collector_->armed() || go.attempt != collector_->attempt()) return absl::OkStatus();
  if (collector_->kind() == AttemptKind::kPush || go.kind == AttemptKind::kPush) {
    received_weights_valid_ = false;
  }
  return collector_->OnGo(go);
}

absl::Status Engine::OnDecision(scheduler::Decision decision) {
  if (collector_->armed() && decision.attempt < collector_->attempt()) return absl::OkStatus();
  fault::FaultPoint("lane.decision");
  collector_->Disarm();
  summed_ = collector_->sum_time();
  normed_ = collector_->norm_time();
  if (opened_.has_value() && opened_->attempt <= decision.attempt) opened_.reset();
  times_.decided = Clock::now();
  if (scheduler::EpochOf(decision.attempt).value() < job_.epoch) {
    // Decided before this lane's time: its predecessor may not have come to the end of it. What is
    // to be published follows as a republish; loaded state is written again, unit by unit.
    if (decision.verdict == Verdict::kCommit && decision.kind != AttemptKind::kLoad) {
      tasks_.push_back({.decision = std::move(decision), .redo = true});
    }
    return absl::OkStatus();
  }
  const bool applies = decision.verdict == Verdict::kCommit || decision.verdict == Verdict::kSkip;
  // Loaded state is written unit by unit and published by a republish.
  if (applies && decision.kind != AttemptKind::kLoad) {
    tasks_.push_back({.decision = std::move(decision)});
  }
  return absl::OkStatus();
}

absl::Status Engine::OnRepublish(const v1::LaneCommand::Republish& republish) {
  fault::FaultPoint("lane.republish");
  tasks_.push_back({.republish = Republish{scheduler::Attempt(republish.attempt()),
                                           {republish.ranks().begin(), republish.ranks().end()}}});
  return absl::OkStatus();
}

absl::Status Engine::OnReadUnit(const v1::LaneCommand::ReadUnit& read,
                                const std::vector<wire::UniqueFd>& fds) {
  const absl::Status status = fds.size() != 1
                                  ? absl::InvalidArgumentError("ReadUnit needs one descriptor")
                                  : ReadUnit(job_, *slots_, device_, *update_stream_, read.unit(),
                                             read.kind(), fds[0].get());
  v1::LaneReport report;
  report.mutable_unit_io()->set_request(read.request());
  if (!status.ok()) report.mutable_unit_io()->set_error(std::string(status.message()));
  return channel_.Send(report);
}

absl::Status Engine::OnWriteUnit(const v1::LaneCommand::WriteUnit& write,
                                 const std::vector<wire::UniqueFd>& fds) {
  if (absl::Status spoilt = SpoilChecks(); !spoilt.ok()) return spoilt;
  // The slot that it frees may be one that is being copied.
  RETURN_IF_ERROR(snapshot_->Leave());
  const absl::Status status = fds.size() != 1
                                  ? absl::InvalidArgumentError("WriteUnit needs one descriptor")
                                  : WriteUnit(job_, *slots_, device_, *update_stream_, write.unit(),
                                              write.kind(), fds[0].get());
  v1::LaneReport report;
  report.mutable_unit_io()->set_request(write.request());
  if (!status.ok()) report.mutable_unit_io()->set_error(std::string(status.message()));
  return channel_.Send(report);
}

absl::Status Engine::OnCopyUpdate(const v1::LaneCommand::CopyUpdate& copy,
                                  const std::vector<wire::UniqueFd>& fds) {
  auto memory = fds.size() != 1 ? absl::InvalidArgumentError("CopyUpdate needs one descriptor")
                                : MapForUpdate(job_, copy.unit(), fds[0].get());
  if (memory.ok()) {
    copy_request_ = copy.request();
    updater_->CopyNext(scheduler::UnitId(copy.unit()), *std::move(memory));
    return absl::OkStatus();
  }
  v1::LaneReport report;
  report.mutable_update_copied()->set_request(copy.request());
  report.mutable_update_copied()->set_error(std::string(memory.status().message()));
  return channel_.Send(report);
}

absl::Status Engine::ReportCopied() {
  const std::optional<Updater::Copied> copied = updater_->TakeCopied();
  if (!copied.has_value()) return absl::OkStatus();
  v1::LaneReport report;
  v1::LaneReport::UpdateCopied& told = *report.mutable_update_copied();
  told.set_request(copy_request_);
  told.set_step(copied->step.value());
  told.set_keep(copied->keep);
  told.set_rate(copied->rate);
  told.set_scale(copied->scale);
  told.set_held_us(copied->held_us);
  return channel_.Send(report);
}

absl::StatusOr<bool> Engine::Progress() {
  RETURN_IF_ERROR(rail_.Advance());
  absl::StatusOr<bool> progress = ProgressAttempt();
  if (!progress.ok()) return progress;
  RETURN_IF_ERROR(rail_.SendReports());
  if (*progress) return progress;
  // Where copies are this thread's own work they come after everything that somebody waits for. The
  // next step waits for those of a snapshot, so these come before a check's digests.
  if (snapshot_->active()) {
    ASSIGN_OR_RETURN(const bool copied, ProgressSnapshot());
    if (copied) return true;
  }
  return check_->active() ? ProgressCheck() : absl::StatusOr<bool>(false);
}

absl::StatusOr<bool> Engine::ProgressAttempt() {
  if (publishing_) return ProgressPublish();
  if (!tasks_.empty()) return StartNext();
  if (opened_.has_value()) {
    absl::StatusOr<bool> armed = ArmNext();
    if (!armed.ok() || !*armed) return armed;
  }
  const bool started = collector_->started();
  const bool all_ready = collector_->all_ready();
  absl::StatusOr<bool> progress = collector_->Progress();
  if (!progress.ok()) return progress;
  if (!started && collector_->started()) times_.first_ready = Clock::now();
  if (!all_ready && collector_->all_ready()) times_.last_ready = Clock::now();
  if (collector_->complete() && !gathered_) {
    RETURN_IF_ERROR(ReportGathered());
  }
  return progress;
}

bool Engine::watches_words() const {
  return publishing_ ? publisher_->watches_words() : collector_->watches_words();
}

bool Engine::device_busy() const {
  if (snapshot_->device_busy()) return true;
  if (publishing_) return updater_->device_busy() || publisher_->device_busy();
  // An attempt that waits to be armed waits for the device, too, or for a message.
  return collector_->device_busy() || opened_.has_value();
}

absl::Status Engine::Describe(v1::LaneReport::Pong& pong) {
  std::vector<int32_t> ranks;
  ASSIGN_OR_RETURN(bool idle, collector_->Idle());
  bool awaits_go = false;
  if (publishing_) {
    publisher_->AddAwaitedRanks(ranks);
    awaits_go = publisher_->awaits_rail();
  } else {
    collector_->AddAwaitedRanks(ranks);
    awaits_go = collector_->awaits_rail();
  }
  pong.set_device_busy(!idle || updater_->device_busy() || publisher_->device_busy() ||
                       snapshot_->device_busy());
  pong.set_awaits_rail(awaits_go || rail_.active());
  pong.mutable_awaited_ranks()->Add(ranks.begin(), ranks.end());
  return absl::OkStatus();
}

absl::StatusOr<bool> Engine::ArmNext() {
  // Messages of an aborted attempt still arrive in memory that the next one uses.
  absl::StatusOr<bool> idle = rail_.Idle();
  if (idle.ok() && *idle) idle = collector_->Idle();
  if (!idle.ok() || !*idle) return idle;
  times_ = {};
  BeginTrace(opened_->attempt);
  gathered_ = false;
  collector_->Arm(opened_->attempt);
  opened_.reset();
  fault::FaultPoint("lane.armed");
  for (const scheduler::Submission& submission : submissions_) {
    if (submission.attempt != collector_->attempt()) continue;
    collector_->OnSubmission(submission);
    times_.last_submit = Clock::now();
  }
  std::erase_if(submissions_, [&](const scheduler::Submission& submission) {
    return submission.attempt <= collector_->attempt();
  });
  return true;
}

absl::Status Engine::ReportGathered() {
  gathered_ = true;
  times_.gathered = Clock::now();
  v1::LaneReport::Gathered& gathered = *report_.mutable_gathered();
  gathered.Clear();
  gathered.set_attempt(collector_->attempt().value());
  gathered.set_collect_us(Microseconds(times_.first_ready, times_.gathered));
  collector_->AddNorms(*gathered.mutable_norms());
  // A push may be what replaces such weights.
  if (collector_->kind() == AttemptKind::kStep) {
    slots_->AddNonFinite(*gathered.mutable_non_finite());
  }
  fault::FaultPoint("lane.gathered");
  absl::Status sent = channel_.Send(report_);
  fault::FaultPoint("lane.gathered.sent");
  return sent;
}

absl::StatusOr<bool> Engine::StartNext() {
  const Task& task = tasks_.front();
  // What is digested is neither written nor published meanwhile.
  if (check_->active()) {
    if (!checked_since_.has_value()) checked_since_ = Clock::now();
    return ProgressCheck();
  }
  if (task.check.has_value()) {
    check_->Start(*std::move(tasks_.front().check));
    tasks_.pop_front();
    checked_since_.reset();
    check_part_us_ = 0;
    return true;
  }
  std::fill(writing_to_.begin(), writing_to_.end(), 0);
  if (task.republish.has_value()) {
    // One trainer alone: other nodes do not take part, their weights lie here since the last time.
    const bool all = task.republish->ranks.empty();
    if (!all && job_.program.nodes > 1 && !received_weights_valid_) {
      return absl::FailedPreconditionError(
          "republish: weights of other nodes' owners do not lie here");
    }
    updater_->StartRefresh();
    publisher_->Start({.attempt = task.republish->attempt,
                       .rail = all,
                       .republish = true,
                       .ranks = &task.republish->ranks});
    NoteWriting(task.republish->ranks);
    publishing_ = true;
    return true;
  }
  if (task.snapshot.has_value()) {
    const scheduler::Attempt attempt = *task.snapshot;
    tasks_.pop_front();
    RETURN_IF_ERROR(StartSnapshot(attempt));
    return true;
  }
  const scheduler::Decision& decision = *task.decision;
  log::Debug("decided", {{"job", job_.name},
                         {"epoch", job_.epoch},
                         {"attempt", decision.attempt},
                         {"step", decision.step},
                         {"verdict", static_cast<int>(decision.verdict)}});
  if (decision.verdict == Verdict::kSkip) {
    times_.updated = times_.decided;
    publisher_->AnnounceAll(decision.attempt);
    RETURN_IF_ERROR(ReportPublished());
    return true;
  }
  updater_->Start(decision);
  publishing_ = true;
  if (task.redo) return true;
  publisher_->Start({.attempt = decision.attempt,
                     .submitted_first = decision.kind == AttemptKind::kStep,
                     .poison = true});
  NoteWriting({});
  return true;
}

absl::StatusOr<bool> Engine::ProgressPublish() {
  absl::StatusOr<bool> progress = publisher_->Progress();
  if (!progress.ok()) return progress;
  if (!updater_->done()) {
    if (!MayUpdateNext()) return progress;
    ASSIGN_OR_RETURN(const scheduler::Batch* const batch, updater_->RunBatch());
    if (batch == nullptr) return progress;
    RETURN_IF_ERROR(ReportCopied());
    if (to_trace_ > 0) TraceBatch(*batch);
    publisher_->OnBatch(*batch);
    if (updater_->done()) {
      times_.updated = Clock::now();
    } else if (MayUpdateNext()) {
      // The device has the next one before copies of this one are enqueued.
      RETURN_IF_ERROR(updater_->BeginBatch());
    }
    return true;
  }
  if (!publisher_->running()) {
    publishing_ = false;
    RETURN_IF_ERROR(ReportPublished());
    return true;
  }
  return progress;
}

bool Engine::MayUpdateNext() {
  if (!snapshot_->Left(updater_->next_batch())) {
    if (!held_since_.has_value()) held_since_ = Clock::now();
    return false;
  }
  if (held_since_.has_value()) held_us_ += Microseconds(*held_since_, Clock::now());
  held_since_.reset();
  return true;
}

absl::Status Engine::ReportPublished() {
  times_.published = Clock::now();
  const Task& task = tasks_.front();
  v1::LaneReport::Published& published = *report_.mutable_published();
  published.Clear();
  published.set_attempt(task.republish.has_value() ? task.republish->attempt.value()
                                                   : task.decision->attempt.value());
  const bool committed = task.decision.has_value() && task.decision->verdict == Verdict::kCommit;
  const bool to_all = task.republish.has_value() && task.republish->ranks.empty();
  if ((committed && !task.redo) || to_all) received_weights_valid_ = true;
  for (size_t rank = 0; rank < writing_to_.size(); ++rank) {
    if (writing_to_[rank] != 0) written_to_[rank] = std::exchange(writing_to_[rank], 0);
  }
  published.set_matrices(committed ? updater_->matrices() : 0);
  if (committed) {
    for (const scheduler::UnitUpdate& update : updater_->updates()) {
      v1::LaneReport::UnitUpdate& told = *published.add_updates();
      told.set_unit(update.unit.value());
      told.set_squares(update.squares);
    }
  }
  if (task.decision.has_value()) {
    v1::StepTiming& timing = *published.mutable_timing();
    FillTiming(times_, timing);
    timing.set_sum_us(summed_.us);
    timing.set_sum_bytes(summed_.bytes);
    timing.set_norm_us(normed_.us);
    timing.set_copy_us(committed ? publisher_->copy_time().us : 0);
    timing.set_copy_bytes(committed ? publisher_->copy_time().bytes : 0);
    timing.set_rail_bytes(rail_.TakeSentBytes());
    if (to_trace_ > 0 && !task.redo) AddTrace(*task.decision, published);
  }
  tasks_.pop_front();
  fault::FaultPoint("lane.published");
  absl::Status sent = channel_.Send(report_);
  fault::FaultPoint("lane.published.sent");
  return sent;
}

// ---- tracing ----

void Engine::OnTrace(const v1::LaneCommand::Trace& trace) {
  trace_next_ = trace;
  if (trace.steps() > 0) return;
  to_trace_ = 0;
  rail_.Trace(nullptr);
}

void Engine::BeginTrace(scheduler::Attempt attempt) {
  if (trace_next_.steps() > 0 && attempt.value() > trace_next_.after_attempt()) {
    to_trace_ = trace_next_.steps();
    trace_next_.Clear();
  }
  if (to_trace_ == 0) return;
  trace_.Clear();
  rail_.Trace(&trace_);
}

// The device works on one batch after the other.
void Engine::TraceBatch(const scheduler::Batch& batch) {
  const int64_t began = trace_.batches_size() == 0
                            ? MonotonicMicroseconds(times_.decided)
                            : trace_.batches(trace_.batches_size() - 1).end_us();
  v1::LaneTrace::Batch& traced = *trace_.add_batches();
  traced.set_begin_us(began);
  traced.set_end_us(MonotonicMicroseconds(Clock::now()));
  traced.set_units(static_cast<int32_t>(batch.units.size()));
  if (batch.kind != scheduler::UnitKind::kMatrix) return;
  traced.set_rows(batch.rows);
  traced.set_cols(batch.cols);
}

void Engine::AddTrace(const scheduler::Decision& decision, v1::LaneReport::Published& published) {
  trace_.set_attempt(decision.attempt.value());
  trace_.set_step(decision.step.value());
  trace_.set_lane(job_.program.lane.value());
  trace_.set_committed(decision.verdict == Verdict::kCommit);
  FillTrace(times_, trace_);
  published.mutable_trace()->Swap(&trace_);
  if (--to_trace_ == 0) rail_.Trace(nullptr);
}

}  // namespace dmuond::server::lane
