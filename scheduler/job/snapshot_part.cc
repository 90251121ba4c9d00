#include "scheduler/job/snapshot_part.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace dmuond::scheduler {
namespace {

constexpr char kHangs[] = "SNAPSHOT_DIR_HANGS";
constexpr char kWeightsNotFinite[] = "WEIGHTS_NOT_FINITE";

}  // namespace

SnapshotPart::Order SnapshotPart::OnSave(const v1::SaveState& save, const Able& able) {
  if (save.attempt() == attempt_) {
    // Told again after a new epoch.
    if (state_ == State::kAnswered) return answer_;
    if (state_ == State::kWriting) return std::monostate();
  }
  ++version_;
  attempt_ = save.attempt();
  state_ = State::kWriting;
  non_finite_.clear();
  if (!able.disk_hangs.empty()) return Answer(able.disk_hangs, kHangs);
  // While lanes are replaced there is nobody to ask, and nobody who would ever answer.
  if (!able.lanes_ready) return Write{"the node's lanes are being replaced"};
  // It was said when the link was down, and the state has gone on.
  if (save.attempt() != able.applied_attempt) return Write{"the node heard of it too late"};
  return Write{};
}

void SnapshotPart::OnNonFinite(uint64_t attempt, std::string what) {
  if (state_ != State::kWriting || attempt != attempt_) return;
  non_finite_ = std::move(what);
  ++version_;
}

std::optional<v1::SnapshotWritten> SnapshotPart::OnWritten(
    uint64_t attempt, const std::vector<v1::SnapshotFile>& files, const std::string& error) {
  if (state_ != State::kWriting || attempt != attempt_) return std::nullopt;
  if (!error.empty()) return Answer(error, "");
  if (!non_finite_.empty()) return Answer(non_finite_, kWeightsNotFinite);
  (void)Answer("", "");
  answer_.mutable_files()->Add(files.begin(), files.end());
  return answer_;
}

std::optional<v1::SnapshotWritten> SnapshotPart::OnDiskHangs(const std::string& how) {
  if (state_ != State::kWriting) return std::nullopt;
  return Answer(how, kHangs);
}

v1::SnapshotWritten SnapshotPart::Answer(const std::string& error, const std::string& reason) {
  ++version_;
  state_ = State::kAnswered;
  answer_.Clear();
  answer_.set_attempt(attempt_);
  answer_.set_node(node_);
  answer_.set_error(error);
  answer_.set_reason(reason);
  return answer_;
}

bool SnapshotPart::OnDone(const v1::SnapshotDone& done) {
  ++version_;
  if (done.has_durable_step()) durable_step_ = done.durable_step();
  done_ = done;
  ++times_done_;
  if (done.error().empty()) saved_attempt_ = done.attempt();
  if (attempt_ == 0 || done.attempt() != attempt_) return false;
  if (!done.error().empty()) {
    attempt_ = 0;
    state_ = State::kIdle;
  }
  return true;
}

void SnapshotPart::OnRepublished(uint64_t before, uint64_t attempt, bool from_snapshot) {
  ++version_;
  if (Saved(before) || from_snapshot) saved_attempt_ = attempt;
}

void SnapshotPart::GoBack() {
  ++version_;
  state_ = State::kIdle;
  attempt_ = 0;
  saved_attempt_ = 0;
}

// ---- the record ----

void SnapshotPart::ToRecord(v1::RecordedSnapshot& record) const {
  record.set_state(static_cast<v1::RecordedSnapshot::State>(static_cast<int>(state_) + 1));
  record.set_attempt(attempt_);
  record.set_non_finite(non_finite_);
  *record.mutable_answer() = answer_;
  if (durable_step_.has_value()) record.set_durable_step(*durable_step_);
  *record.mutable_done() = done_;
  record.set_times_done(times_done_);
  record.set_saved_attempt(saved_attempt_);
}
static_assert(static_cast<int>(SnapshotPart::State::kIdle) + 1 == v1::RecordedSnapshot::STATE_IDLE);
static_assert(static_cast<int>(SnapshotPart::State::kAnswered) + 1 ==
              v1::RecordedSnapshot::STATE_ANSWERED);

absl::StatusOr<SnapshotPart> SnapshotPart::FromRecord(int32_t node,
                                                      const v1::RecordedSnapshot& record) {
  if (record.state() < v1::RecordedSnapshot::STATE_IDLE ||
      record.state() > v1::RecordedSnapshot::STATE_ANSWERED) {
    return absl::InvalidArgumentError(
        absl::StrCat("RecordedSnapshot.state has the unknown value ", record.state()));
  }
  SnapshotPart part(node);
  part.state_ = static_cast<State>(record.state() - 1);
  part.attempt_ = record.attempt();
  part.non_finite_ = record.non_finite();
  part.answer_ = record.answer();
  if (record.has_durable_step()) part.durable_step_ = record.durable_step();
  part.done_ = record.done();
  part.times_done_ = record.times_done();
  part.saved_attempt_ = record.saved_attempt();
  return part;
}

}  // namespace dmuond::scheduler
