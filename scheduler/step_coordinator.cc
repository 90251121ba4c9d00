#include "scheduler/step_coordinator.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace dmuond::scheduler {
namespace {

const char* Verb(AttemptKind kind) {
  switch (kind) {
    case AttemptKind::kStep:
      return "submits a step";
    case AttemptKind::kPush:
      return "pushes parameters";
    case AttemptKind::kLoad:
      return "loads state";
  }
  return "unknown";
}

std::vector<NodeRank> NodesWithoutTrainers(const PlanInputs& inputs) {
  std::vector<NodeRank> nodes;
  for (int32_t node = 0; node < inputs.nodes; ++node) {
    const auto& trainers = inputs.layout.trainers;
    if (std::none_of(trainers.begin(), trainers.end(),
                     [node](const Trainer& trainer) { return trainer.node.value() == node; })) {
      nodes.emplace_back(node);
    }
  }
  return nodes;
}

std::vector<std::vector<int32_t>> HeldParameters(const Layout& layout) {
  std::vector<std::vector<int32_t>> held(layout.trainers.size());
  for (const LayoutFragment& fragment : layout.fragments) {  // sorted by parameter
    std::vector<int32_t>& parameters = held[fragment.rank.value()];
    if (parameters.empty() || parameters.back() != fragment.parameter) {
      parameters.push_back(fragment.parameter);
    }
  }
  return held;
}

std::string Text(double value) { return absl::StrFormat("%.17g", value); }

// A word for several numbers: "rank 3", "ranks 1, 2".
template <typename Numbers>
std::string Listed(const char* word, const Numbers& numbers) {
  return absl::StrCat(word, numbers.size() == 1 ? " " : "s ",
                      absl::StrJoin(numbers, ", ", [](std::string* out, const auto& number) {
                        absl::StrAppend(out, number.value());
                      }));
}

// Two ranks and what each of them does or has; the lower one first. To programs the names of the
// second one's values begin with "other_".
Message Both(TrainerRank rank_a, const Message& a, TrainerRank rank_b, const Message& b) {
  if (rank_b < rank_a) return Both(rank_b, b, rank_a, a);
  Message other = b;
  for (auto& [name, value] : other.metadata) name = absl::StrCat("other_", name);
  return Say("rank ", Named("rank", rank_a.value()), " ", a, ", rank ",
             Named("other_rank", rank_b.value()), " ", other);
}

}  // namespace

StepCoordinator::StepCoordinator(const PlanInputs& inputs, const Plan& plan, Attempt first_attempt,
                                 StepId last_committed, CoordinatorOptions options)
    : inputs_(inputs),
      plan_(plan),
      options_(options),
      held_(HeldParameters(inputs.layout)),
      without_trainers_(NodesWithoutTrainers(inputs)),
      open_{first_attempt, StepId(last_committed.value() + 1)},
      last_committed_(last_committed) {
  open_.gather = gather_;
  auto tables = MakeRailTables(inputs, plan);
  if (tables.ok()) {
    tables_ = *std::move(tables);
    partials_ = CountBuckets(tables_.partials);
    weights_ = CountBuckets(tables_.weights);
    adopts_ = CountBuckets(tables_.adopts);
    try_.collect = NewGate();
  } else {
    lost_ = Loss{OutcomeReason::kLayoutChanged, std::string(tables.status().message())};
  }
}

OpenAttempt StepCoordinator::Current() const { return open_; }
StepId StepCoordinator::last_committed() const { return last_committed_; }

// ---- submissions ----

std::vector<CoordinatorAction> StepCoordinator::OnSubmission(TimePoint now,
                                                             const Submission& submission) {
  const int32_t rank = submission.rank.value();
  if (suspended_ || halted_) return {};  // answered, with every other one, by OnReformed()
  if (submission.attempt != open_.attempt || rank < 0 || rank >= static_cast<int32_t>(held_.size()))
    return {};
  if (try_.submissions.contains(submission.rank)) return {};
  const bool first = !try_.first.has_value();
  if (!first) {
    if (auto disagreement = Disagree(submission)) return Refuse(*disagreement);
  } else {
    try_.first = submission.rank;
    try_.first_at = now;
  }
  try_.last_at = now;
  try_.submissions.emplace(submission.rank, submission);
  NoteAbsent(submission);

  if (lost_) return Abort(lost_->reason, lost_->detail, /*retry=*/false);
  if (submission.withdraw) {
    return Abort(OutcomeReason::kWithdrawn,
                 absl::StrCat("rank ", rank, " withdrew gradients that it had signalled as ready"),
                 /*retry=*/true);
  }
  if (submission.step != StepOf(submission.kind)) {
    return Refuse({"STEP_OUT_OF_ORDER",
                   Say("rank ", Named("rank", rank), " ", Verb(submission.kind), " at step ",
                       Named("step", submission.step.value()), ", the group is at ",
                       Named("next", StepOf(submission.kind).value()))});
  }
  if (submission.kind == AttemptKind::kPush) {
    if (auto disagreement = AddPushed(submission)) return Refuse(*disagreement);
  }
  const NodeRank node = inputs_.layout.trainers[rank].node;
  if (submission.kind != AttemptKind::kStep && try_.early.contains(node)) {
    return Abort(OutcomeReason::kWithdrawn,
                 absl::StrCat("rank ", rank, " ", Verb(submission.kind),
                              " after its node has signalled gradients of the same attempt"),
                 /*retry=*/true);
  }
  std::vector<CoordinatorAction> actions;
  if (first) {
    for (NodeRank away : without_trainers_) actions.emplace_back(Begun{away, submission});
  }
  if (!AllSubmitted()) return actions;
  if (Kind() != AttemptKind::kStep) {
    for (int32_t rail = 0; rail < inputs_.lanes_per_node; ++rail) {
      AppendCollectGoes(LaneIndex(rail), actions);
    }
  }
  Actions decided = DecideIfComplete();
  std::move(decided.begin(), decided.end(), std::back_inserter(actions));
  return actions;
}

std::optional<StepCoordinator::Disagreement> StepCoordinator::Disagree(
    const Submission& submission) const {
  const Submission& first = try_.submissions.at(*try_.first);
  if (submission.withdraw) return std::nullopt;  // ends the attempt whatever else it says
  if (first.kind != submission.kind) {
    return Disagreement{"KIND_DIFFERS",
                        Say("step ", Named("step", open_.step.value()), ": ",
                            Both(first.rank, Say(Named("does", Verb(first.kind))), submission.rank,
                                 Say(Named("does", Verb(submission.kind)))))};
  }
  if (submission.kind != AttemptKind::kStep) return std::nullopt;
  const auto mismatch = Compare(first.scalars, submission.scalars);
  if (!mismatch) return std::nullopt;
  return Disagreement{
      "SCALARS_DIFFER",
      Say("step ", Named("step", open_.step.value()), ": ", Named("field", mismatch->field),
          " differs: ",
          Both(first.rank, Say("has ", Named("value", Text(mismatch->first))), submission.rank,
               Say("has ", Named("value", Text(mismatch->second)))))};
}

// Every holder of a parameter must push it, or none.
std::optional<StepCoordinator::Disagreement> StepCoordinator::AddPushed(
    const Submission& submission) {
  const std::vector<int32_t>& held = held_[submission.rank.value()];
  const auto pushes = [&](int32_t parameter) {
    return submission.pushed.empty() ||
           std::binary_search(submission.pushed.begin(), submission.pushed.end(), parameter);
  };
  for (int32_t parameter : submission.pushed) {
    if (std::binary_search(held.begin(), held.end(), parameter)) continue;
    return Disagreement{"PUSH_DIFFERS",
                        Say("rank ", Named("rank", submission.rank.value()), " pushes parameter ",
                            Named("parameter", parameter), ", of which it holds nothing")};
  }
  for (int32_t parameter : held) {
    auto& mine = pushes(parameter) ? try_.pushed_by : try_.kept_by;
    auto& others = pushes(parameter) ? try_.kept_by : try_.pushed_by;
    mine.emplace(parameter, submission.rank);
    if (const auto other = others.find(parameter); other != others.end()) {
      const char* verbs[] = {"does not push it", "pushes it"};
      return Disagreement{
          "PUSH_DIFFERS",
          Say("parameter \"", Named("parameter", inputs_.layout.parameters[parameter].name), "\": ",
              Both(submission.rank, Say(Named("does", verbs[pushes(parameter) ? 1 : 0])),
                   other->second, Say(Named("does", verbs[pushes(parameter) ? 0 : 1]))))};
    }
  }
  return std::nullopt;
}

AttemptKind StepCoordinator::Kind() const {
  return try_.first ? try_.submissions.at(*try_.first).kind : AttemptKind::kStep;
}

StepId StepCoordinator::StepOf(AttemptKind kind) const {
  return kind == AttemptKind::kStep ? open_.step : last_committed_;
}

bool StepCoordinator::AllSubmitted() const { return try_.submissions.size() == held_.size(); }

std::vector<AbsentFragment> StepCoordinator::Absent() const {
  std::vector<AbsentFragment> absent;
  for (const auto& [rank, submission] : try_.submissions) {
    for (int32_t parameter : submission.absent) absent.push_back({rank, parameter});
  }
  std::sort(absent.begin(), absent.end());
  return absent;
}

// Empty: all.
std::vector<int32_t> StepCoordinator::Pushed() const {
  if (try_.kept_by.empty()) return {};
  std::vector<int32_t> pushed;
  for (const auto& [parameter, rank] : try_.pushed_by) pushed.push_back(parameter);
  return pushed;
}

// ---- rails ----

std::vector<CoordinatorAction> StepCoordinator::OnRailReady(TimePoint now, NodeRank node,
                                                            const RailReady& ready) {
  Actions actions;
  if (suspended_ || node.value() < 0 || node.value() >= inputs_.nodes) return {};
  if (ready.attempt != UnderWay(ready.operation)) return {};
  if (ready.operation == RailOperation::kPublish) {
    for (const BucketRun& run : ready.buckets) publish_.Report(ready.rail, run, node);
    AppendGo(publish_, tables_.weights, weights_, ready, actions);
    return actions;
  }
  if (halted_) return {};
  if (ready.kind == AttemptKind::kStep) {
    if (!try_.collects_from.has_value()) try_.collects_from = now;
    try_.collects_until = now;
    const auto sends = [&](const BucketRun& run) {
      const int32_t end = std::min(run.end().value(), plan_.buckets);
      for (int32_t b = run.first.value(); b < end; ++b) {
        if (tables_.SendsPartials(ready.rail, BucketId(b), node)) return true;
      }
      return false;
    };
    if (!try_.early.contains(node) &&
        std::any_of(ready.buckets.begin(), ready.buckets.end(), sends)) {
      try_.early.Add(node);
    }
    if (try_.early.contains(node) && Kind() != AttemptKind::kStep) {
      return Abort(OutcomeReason::kWithdrawn,
                   absl::StrCat("node ", node.value(),
                                " has gradients to send in an attempt that is a push"),
                   /*retry=*/true);
    }
  }
  for (const BucketRun& run : ready.buckets) try_.collect.Report(ready.rail, run, node);
  AppendCollectGoes(ready.rail, actions);
  return actions;
}

void StepCoordinator::AppendCollectGoes(LaneIndex rail, Actions& actions) {
  const bool step = Kind() == AttemptKind::kStep;
  // Until all have submitted nobody knows that they all push: a lane that takes part in a step
  // would send something else.
  if (!step && !AllSubmitted()) return;
  AppendGo(try_.collect, step ? tables_.partials : tables_.adopts, step ? partials_ : adopts_,
           {.attempt = open_.attempt, .rail = rail, .kind = Kind()}, actions);
}

void StepCoordinator::AppendGo(RailGate& gate, const RailTable& table, int32_t all,
                               const RailReady& of, Actions& actions) const {
  BucketRuns buckets = gate.Take(of.rail, table);
  if (buckets.empty()) return;
  const bool collect = of.operation == RailOperation::kCollect;
  Go go{.attempt = of.attempt,
        .rail = of.rail,
        .operation = of.operation,
        .kind = collect ? of.kind : AttemptKind::kStep,
        .buckets = std::move(buckets),
        .last = gate.taken() == all};
  // Complete: a bucket in which a rank lacks a gradient is only reported after that rank's
  // submission, by the same member and on the same stream.
  for (const BucketRun& run : go.buckets) {
    if (!collect) break;
    for (auto absent = try_.absent_in.lower_bound(run.first.value());
         absent != try_.absent_in.end() && absent->first < run.end().value(); ++absent) {
      go.absent.insert(go.absent.end(), absent->second.begin(), absent->second.end());
    }
  }
  actions.emplace_back(std::move(go));
}

void StepCoordinator::NoteAbsent(const Submission& submission) {
  const auto& buckets = plan_.parameter_bucket;
  for (const int32_t parameter : submission.absent) {
    if (parameter < 0 || parameter >= static_cast<int32_t>(buckets.size())) continue;
    try_.absent_in[buckets[parameter]].push_back({submission.rank, parameter});
  }
}

// ---- votes ----

std::vector<CoordinatorAction> StepCoordinator::OnVote(TimePoint /*now*/, Attempt attempt,
                                                       NodeRank node, uint64_t plan_digest,
                                                       std::vector<UnitNorm> norms,
                                                       const std::string& error) {
  if (suspended_ || halted_) return {};
  if (attempt != open_.attempt || node.value() < 0 || node.value() >= inputs_.nodes) return {};
  if (!try_.votes.insert(node).second) return {};
  if (!error.empty()) {
    return Abort(OutcomeReason::kLaneLost, absl::StrCat("node ", node.value(), ": ", error),
                 /*retry=*/false);
  }
  if (plan_digest != plan_.digest) {
    return Abort(OutcomeReason::kLayoutChanged,
                 absl::StrFormat("node %d works by plan %016x, the coordinator by %016x",
                                 node.value(), plan_digest, plan_.digest),
                 /*retry=*/false);
  }
  for (const UnitNorm& norm : norms) {
    const int32_t unit = norm.unit.value();
    if (unit >= 0 && unit < static_cast<int32_t>(plan_.units.size()) &&
        plan_.units[unit].owner.value() / inputs_.lanes_per_node == node.value()) {
      continue;
    }
    return Abort(OutcomeReason::kLaneLost,
                 absl::StrCat("node ", node.value(), " reports the norm of unit ", unit,
                              ", which it does not own"),
                 /*retry=*/false);
  }
  if (try_.norms.empty()) {
    try_.norms = std::move(norms);
  } else {
    std::move(norms.begin(), norms.end(), std::back_inserter(try_.norms));
  }
  return DecideIfComplete();
}

// ---- losses and timeouts ----

std::vector<CoordinatorAction> StepCoordinator::OnLost(TimePoint /*now*/, OutcomeReason reason,
                                                       const std::string& detail) {
  if (lost_) return {};
  lost_ = Loss{reason, detail};
  suspended_ = halted_ = false;  // there is nothing left to wait for
  return Abort(reason, detail, /*retry=*/false);
}

std::vector<CoordinatorAction> StepCoordinator::OnRankGone(TimePoint now, TrainerRank rank,
                                                           uint64_t incarnation,
                                                           const std::string& detail) {
  if (incarnation < incarnations_[rank]) return {};
  if (!lost_ && options_.session_linger.count() == 0) {
    return OnLost(now, OutcomeReason::kTrainerMissing, detail);
  }
  const auto [gone, first] = gone_.try_emplace(rank, Gone{incarnation, now, detail});
  gone->second.incarnation = std::max(gone->second.incarnation, incarnation);
  if (!first || suspended_ || halted_) return {};
  // Whoever replaces it all the same hears of the loss as the others do.
  if (lost_) return Abort(lost_->reason, lost_->detail, /*retry=*/false);
  return Abort(OutcomeReason::kTrainerMissing, absl::StrCat(detail, "; its replacement may come"),
               /*retry=*/true);
}

void StepCoordinator::OnRankBack(TimePoint now, TrainerRank rank, uint64_t incarnation) {
  uint64_t& newest = incarnations_[rank];
  newest = std::max(newest, incarnation);
  const auto gone = gone_.find(rank);
  if (gone == gone_.end() || gone->second.incarnation >= incarnation) return;
  gone_.erase(gone);
  if (try_.first) try_.first_at = now;
}

StepLacks StepCoordinator::Lacks() const {
  StepLacks lacks{.step = open_.step, .kind = Kind()};
  for (const auto& [rank, gone] : gone_) lacks.dead.emplace(rank, gone.since);
  if (suspended_ || halted_ || !try_.first) return lacks;
  lacks.first_at = try_.first_at;
  lacks.last_at = try_.last_at;
  for (int32_t rank = 0; rank < static_cast<int32_t>(held_.size()); ++rank) {
    const TrainerRank asked(rank);
    if (!try_.submissions.contains(asked) && !gone_.contains(asked)) lacks.silent.push_back(asked);
  }
  if (!AllSubmitted()) return lacks;
  for (int32_t node = 0; node < inputs_.nodes; ++node) {
    if (!try_.votes.contains(NodeRank(node))) lacks.gathering.emplace_back(node);
  }
  return lacks;
}

std::vector<CoordinatorAction> StepCoordinator::OnTick(TimePoint now) {
  for (const auto& [rank, gone] : gone_) {
    if (lost_ || now - gone.since < options_.session_linger) continue;
    return OnLost(now, OutcomeReason::kTrainerMissing,
                  absl::StrCat(gone.detail, ", and no replacement came within ",
                               options_.session_linger.count(), " ms"));
  }
  if (suspended_ || halted_ || !try_.first) return {};
  if (!AllSubmitted()) {
    if (now - try_.first_at < options_.step_timeout) return {};
    std::vector<TrainerRank> missing;
    for (int32_t rank = 0; rank < static_cast<int32_t>(held_.size()); ++rank) {
      const TrainerRank asked(rank);
      if (!try_.submissions.contains(asked) && !gone_.contains(asked)) missing.push_back(asked);
    }
    if (missing.empty()) return {};
    const std::string detail = absl::StrCat("no step from ", Listed("rank", missing), " within ",
                                            options_.step_timeout.count(), " ms of the first");
    Actions actions;
    for (const TrainerRank rank : missing) actions.emplace_back(Expel{rank, open_.attempt, detail});
    Actions aborted = Abort(OutcomeReason::kTrainerMissing, detail, /*retry=*/true);
    std::move(aborted.begin(), aborted.end(), std::back_inserter(actions));
    return actions;
  }
  const std::chrono::milliseconds timeout = options_.work_timeout();
  if (now - try_.last_at < timeout) return {};
  std::vector<NodeRank> missing;
  for (int32_t node = 0; node < inputs_.nodes; ++node) {
    if (!try_.votes.contains(NodeRank(node))) missing.emplace_back(node);
  }
  const bool told = std::exchange(try_.overdue, true);
  if (told && now - try_.last_at < 2 * timeout) return {};
  const std::string detail =
      absl::StrCat("gradients not collected on ", Listed("node", missing), " within ",
                   (told ? 2 : 1) * timeout.count(), " ms of the last submit");
  if (told) return Abort(OutcomeReason::kLaneLost, detail, /*retry=*/false);
  Actions actions;
  for (const NodeRank node : missing) {
    actions.emplace_back(GatherOverdue{node, open_.attempt, detail});
  }
  return actions;
}

// ---- new epochs and restored jobs ----

void StepCoordinator::Suspend() { suspended_ = !lost_; }

void StepCoordinator::Halt() { halted_ = !lost_; }

std::vector<CoordinatorAction> StepCoordinator::OnReformed(Attempt first, OutcomeReason reason,
                                                           const std::string& detail) {
  suspended_ = halted_ = false;
  Actions actions;
  if (applied_) actions.emplace_back(*applied_);
  Decision aborted = Blank(Verdict::kAbort);
  aborted.outcome.reason = lost_ ? lost_->reason : reason;
  aborted.outcome.detail = lost_ ? lost_->detail : detail;
  aborted.outcome.retry = !lost_;
  aborted.lost = lost_.has_value();
  aborted.outcome.next_attempt = has_state() ? Attempt(first.value() + 1) : first;
  actions.emplace_back(std::move(aborted));
  Open(first);
  if (!has_state()) {
    actions.emplace_back(open_);
    return actions;
  }
  Actions restarted = Restart();
  std::move(restarted.begin(), restarted.end(), std::back_inserter(actions));
  return actions;
}

std::vector<CoordinatorAction> StepCoordinator::Restart() {
  suspended_ = false;
  publishing_ = open_.attempt;
  publish_ = NewGate();
  const Republish republish{open_.attempt, last_committed_};
  Open(Attempt(open_.attempt.value() + 1));
  return {republish, open_};
}

// ---- decisions ----

std::vector<CoordinatorAction> StepCoordinator::DecideIfComplete() {
  if (!AllSubmitted() || static_cast<int32_t>(try_.votes.size()) < inputs_.nodes) return {};
  if (Kind() == AttemptKind::kStep) return DecideStep();
  Decision decision = Blank(Verdict::kCommit);
  decision.outcome.kind = OutcomeKind::kCommitted;
  decision.pushed = Pushed();
  return Decide(std::move(decision));
}

std::vector<CoordinatorAction> StepCoordinator::DecideStep() {
  Decision decision = Blank(Verdict::kCommit);
  decision.absent = Absent();
  const std::vector<bool> active = ActiveUnits(inputs_.layout, plan_, decision.absent);
  auto total = TotalNorm(inputs_.layout, plan_, active, try_.norms);
  if (!total.ok()) {
    return Abort(OutcomeReason::kLaneLost, std::string(total.status().message()), /*retry=*/false);
  }
  if (auto why = NotFinite(*total)) return Skip(total->norm, *std::move(why));
  decision.scalars = try_.submissions.at(*try_.first).scalars;
  decision.clip_coefficient = ClipCoefficient(total->norm, decision.scalars.max_grad_norm);
  decision.outcome.kind = OutcomeKind::kCommitted;
  decision.outcome.gradient_norm = total->norm;
  decision.outcome.clip_coefficient = decision.clip_coefficient;
  for (const Unit& unit : plan_.units) {
    if (unit.kind == UnitKind::kMatrix && active[unit.id.value()]) ++decision.outcome.matrices;
  }
  return Decide(std::move(decision));
}

std::optional<std::string> StepCoordinator::NotFinite(const GradientNorm& norm) const {
  const std::vector<Parameter>& parameters = inputs_.layout.parameters;
  const auto of = [&](int32_t parameter) {
    // A rank's own gradient comes with a message, whose numbers may be any.
    const bool known = parameter >= 0 && parameter < static_cast<int32_t>(parameters.size());
    return absl::StrCat("the gradient of parameter \"",
                        known ? parameters[parameter].name : absl::StrCat(parameter),
                        "\" is not finite");
  };
  if (norm.first_infinite) return of(plan_.units[norm.first_infinite->value()].parameter);
  for (const auto& [rank, submission] : try_.submissions) {
    if (submission.not_finite.has_value()) {
      return absl::StrCat(of(*submission.not_finite), " on rank ", rank.value());
    }
  }
  if (!std::isfinite(norm.norm)) return absl::StrCat("the gradient's norm is ", norm.norm);
  return std::nullopt;
}

std::vector<CoordinatorAction> StepCoordinator::Skip(double norm, std::string detail) {
  const bool give_up = skips_in_a_row_ >= options_.skips_max;
  if (give_up) absl::StrAppend(&detail, ", after ", skips_in_a_row_, " skipped steps in a row");
  Decision decision = Blank(give_up ? Verdict::kAbort : Verdict::kSkip);
  decision.outcome.kind = give_up ? OutcomeKind::kAborted : OutcomeKind::kSkipped;
  decision.outcome.reason = OutcomeReason::kNonFinite;
  decision.outcome.detail = std::move(detail);
  // What lanes have read may be finite all the same.
  decision.outcome.gradient_norm =
      std::isfinite(norm) ? std::numeric_limits<double>::quiet_NaN() : norm;
  return Decide(std::move(decision));
}

std::vector<CoordinatorAction> StepCoordinator::Abort(OutcomeReason reason, std::string detail,
                                                      bool retry) {
  Decision decision = Blank(Verdict::kAbort);
  decision.outcome.reason = reason;
  decision.outcome.detail = std::move(detail);
  decision.outcome.retry = retry;
  decision.lost = lost_.has_value();
  return Decide(std::move(decision));
}

std::vector<CoordinatorAction> StepCoordinator::Refuse(const Disagreement& disagreement) {
  Decision decision = Blank(Verdict::kRefuse);
  decision.refuse_reason = disagreement.reason;
  decision.refuse_message = disagreement.message.text;
  decision.refuse_metadata = disagreement.message.metadata;
  decision.outcome.detail = disagreement.message.text;
  return Decide(std::move(decision));
}

Decision StepCoordinator::Blank(Verdict verdict) const {
  Decision decision;
  decision.attempt = open_.attempt;
  decision.kind = Kind();
  decision.step = StepOf(decision.kind);
  decision.verdict = verdict;
  decision.outcome.step = decision.step;
  decision.outcome.attempt = open_.attempt;
  decision.outcome.next_attempt = Attempt(open_.attempt.value() + 1);
  return decision;
}

std::vector<CoordinatorAction> StepCoordinator::Decide(Decision decision) {
  const bool committed = decision.verdict == Verdict::kCommit;
  const bool step = decision.kind == AttemptKind::kStep;
  if (committed) {
    publishing_ = decision.attempt;
    publish_ = NewGate();
    if (step) skips_in_a_row_ = 0;
  }
  if (step && committed && try_.collects_from.has_value()) {
    const auto pass = std::chrono::duration_cast<std::chrono::microseconds>(try_.collects_until -
                                                                            *try_.collects_from);
    // The first report has waited for half a round, in the middle; the last one has not.
    gather_ = std::clamp((pass + gather_ / 2) / kGatherParts, kGatherMin, kGatherMax);
  }
  if (decision.verdict == Verdict::kSkip) ++skips_in_a_row_;
  if ((committed && step) || decision.verdict == Verdict::kSkip) last_committed_ = decision.step;

  if (committed || decision.verdict == Verdict::kSkip) applied_ = decision;
  Open(decision.outcome.next_attempt);
  Actions actions;
  actions.emplace_back(std::move(decision));
  actions.emplace_back(open_);
  return actions;
}

void StepCoordinator::Open(Attempt attempt) {
  open_ = {attempt, StepId(last_committed_.value() + 1), gather_};
  try_ = Try{};
  try_.collect = NewGate();
}

}  // namespace dmuond::scheduler
