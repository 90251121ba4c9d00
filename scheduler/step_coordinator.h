// Decides every attempt of a job: opens it, lets buckets cross the rails, and ends the attempt as
// commit, skip, abort or refuse. Lives in the daemon of node 0. Pure: time is passed in, and what
// is to be done is returned. Every action goes to every member, in the order returned. Messages of
// other attempts than the current one are ignored, so duplicates and stragglers do no harm. Only
// the publishing of the last committed attempt goes on beside its successor.
#ifndef DMUOND_SCHEDULER_STEP_COORDINATOR_H_
#define DMUOND_SCHEDULER_STEP_COORDINATOR_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "scheduler/awaited.h"
#include "scheduler/clip.h"
#include "scheduler/plan.h"
#include "scheduler/reason.h"
#include "scheduler/step.h"
#include "scheduler/step_rails.h"

namespace dmuond::scheduler {

struct CoordinatorOptions {
  std::chrono::milliseconds step_timeout{600'000};  // a rank without submit, after the first one
  std::chrono::milliseconds lane_timeout{0};        // of a lane without a sign of life
  std::chrono::milliseconds session_linger{0};      // of a dead rank's place, for a replacement
  int32_t skips_max = 50;                           // in a row; then steps are aborted, no retry

  // How long a lane may take for work for which it has all that it needs.
  [[nodiscard]] std::chrono::milliseconds work_timeout() const {
    return std::max(step_timeout, lane_timeout);
  }
};

class StepCoordinator {
 public:
  // `inputs` and `plan` must outlive the machine. Opens `first_attempt` for last_committed + 1.
  StepCoordinator(const PlanInputs& inputs, const Plan& plan, Attempt first_attempt,
                  StepId last_committed, CoordinatorOptions options);

  // The attempt now open; told to members when they are ready.
  [[nodiscard]] OpenAttempt Current() const;
  [[nodiscard]] StepId last_committed() const;
  // Who has a part in what goes. REQUIRES: not lost from the beginning.
  [[nodiscard]] const RailTables& tables() const { return tables_; }

  [[nodiscard]] std::vector<CoordinatorAction> OnSubmission(TimePoint now,
                                                            const Submission& submission);
  // A lane's parts of buckets of its rail lie ready to cross. All lanes that have transfers of a
  // bucket must report it; then it goes, in the order of buckets within (rail, operation). kCollect
  // means the adopts of a push or load, which go when every rank has submitted, and else partial
  // gradients, which may go before anybody has; `ready.kind` says which the lane means. A rank that
  // pushes after gradients of its node were reported (buckets signalled early, then weights loaded)
  // ends the attempt for a retry.
  [[nodiscard]] std::vector<CoordinatorAction> OnRailReady(TimePoint now, NodeRank node,
                                                           const RailReady& ready);
  // A node holds every gradient that its owners need. Non-empty `error`: it cannot commit. Such a
  // node, or one with another plan, aborts the attempt at once and is named.
  [[nodiscard]] std::vector<CoordinatorAction> OnVote(TimePoint now, Attempt attempt, NodeRank node,
                                                      uint64_t plan_digest,
                                                      std::vector<UnitNorm> norms,
                                                      const std::string& error);
  // Somebody is gone for good, and the job cannot go on: the open attempt aborts without retry, and
  // `detail` names who it is. From then on every submission is answered at once by the same outcome
  // under its own attempt (each ends that attempt and opens the next one), so nobody waits for the
  // lost one. A job that goes on nevertheless gets a new machine. A second loss changes nothing.
  [[nodiscard]] std::vector<CoordinatorAction> OnLost(TimePoint now, OutcomeReason reason,
                                                      const std::string& detail);
  // A trainer died. The open attempt aborts for a retry, which waits for a replacement. If none has
  // attached (OnRankBack) within session_linger, the loss is for good, as in OnLost. News of an
  // incarnation that has a successor already is ignored.
  [[nodiscard]] std::vector<CoordinatorAction> OnRankGone(TimePoint now, TrainerRank rank,
                                                          uint64_t incarnation,
                                                          const std::string& detail);
  // A trainer has attached; if it is a replacement, it has a whole step_timeout to submit.
  void OnRankBack(TimePoint now, TrainerRank rank, uint64_t incarnation);
  // Replacements of dead trainers have a whole session_linger from now on.
  void AwaitAnew(TimePoint now) {
    for (auto& [rank, gone] : gone_) gone.since = now;
  }
  [[nodiscard]] bool lost() const { return lost_.has_value(); }
  // The group is losing its lanes, or a member: nothing is decided from here to OnReformed();
  // deaths and returns of trainers are noted.
  void Suspend();
  // A member is about to leave, with a copy of the state: nothing more is decided from here to
  // OnReformed(), but what is committed is still published. Deaths and returns of trainers are
  // noted.
  void Halt();
  // The attempt whose buckets may cross rails in such an operation.
  [[nodiscard]] Attempt UnderWay(RailOperation operation) const {
    return operation == RailOperation::kPublish ? publishing_ : open_.attempt;
  }
  // Somebody has submitted the open attempt.
  [[nodiscard]] bool in_flight() const { return try_.first.has_value(); }
  // … as a push or a load: weights of its own.
  [[nodiscard]] bool pushing() const { return Kind() != AttemptKind::kStep; }
  // All lanes are new, under `first`'s epoch, and nothing of the state is lost. Tells the last
  // commit again, for members that missed it and lanes that have to finish it, ends the attempt
  // that was open for a retry under the new epoch, and has everything published. REQUIRES:
  // suspended. Ends a halt too.
  [[nodiscard]] std::vector<CoordinatorAction> OnReformed(Attempt first, OutcomeReason reason,
                                                          const std::string& detail);
  // A job whose state comes from a snapshot, when every rank has attached: under the open attempt
  // every trainer gets the weights of last_committed(), and the next one opens.
  [[nodiscard]] std::vector<CoordinatorAction> Restart();
  // Whether a step, push, load or restart has committed: a returning trainer then gets the state.
  [[nodiscard]] bool has_state() const { return publishing_.value() != 0; }
  // What the open attempt waits for.
  [[nodiscard]] StepLacks Lacks() const;
  // Timeouts. Call at least every 100 ms. When step_timeout has passed since the first submission,
  // ranks that are missing without being known as dead are expelled, and the attempt aborts for a
  // retry. When a node's vote is missing work_timeout() after the last submission, the node is told
  // to end who hangs there; after twice that nothing has helped, and the attempt aborts without
  // retry.
  [[nodiscard]] std::vector<CoordinatorAction> OnTick(TimePoint now);

 private:
  // A job that somebody left for good: why.
  struct Loss {
    OutcomeReason reason = OutcomeReason::kNone;
    std::string detail;
  };
  // A rank whose place waits for a replacement.
  struct Gone {
    uint64_t incarnation = 0;
    TimePoint since;
    std::string detail;
  };
  // What two ranks disagree on.
  struct Disagreement {
    std::string reason;
    Message message;
  };
  // All that belongs to the open attempt alone.
  struct Try {
    std::map<TrainerRank, Submission> submissions;
    std::optional<TrainerRank> first;  // whoever submitted first: others are compared with it
    TimePoint first_at;
    TimePoint last_at;
    std::map<int32_t, TrainerRank> pushed_by;  // kPush: parameter -> first holder that pushes it
    std::map<int32_t, TrainerRank> kept_by;    // kPush: … and first holder that does not
    std::set<NodeRank> votes;
    bool overdue = false;  // nodes without a vote have been told
    std::vector<UnitNorm> norms;
    // Of all submissions, by bucket: what a GO names.
    std::map<int32_t, std::vector<AbsentFragment>> absent_in;
    NodeSet early;  // nodes of which a lane has reported gradients to send
    RailGate collect;
    // When gradients were reported as ready, for the first and for the last time.
    std::optional<TimePoint> collects_from;
    TimePoint collects_until;
  };
  using Actions = std::vector<CoordinatorAction>;

  [[nodiscard]] AttemptKind Kind() const;
  [[nodiscard]] StepId StepOf(AttemptKind kind) const;
  [[nodiscard]] bool AllSubmitted() const;
  [[nodiscard]] std::vector<AbsentFragment> Absent() const;
  [[nodiscard]] std::vector<int32_t> Pushed() const;
  [[nodiscard]] std::optional<Disagreement> Disagree(const Submission& submission) const;
  [[nodiscard]] std::optional<Disagreement> AddPushed(const Submission& submission);

  [[nodiscard]] Decision Blank(Verdict verdict) const;
  [[nodiscard]] Actions Decide(Decision decision);  // and opens the next attempt
  void Open(Attempt attempt);
  [[nodiscard]] Actions Abort(OutcomeReason reason, std::string detail, bool retry);
  [[nodiscard]] Actions Refuse(const Disagreement& disagreement);
  [[nodiscard]] Actions DecideIfComplete();
  [[nodiscard]] Actions DecideStep();
  [[nodiscard]] Actions Skip(double norm, std::string why);
  // Says, for people, which gradient is not finite; unset: all are.
  [[nodiscard]] std::optional<std::string> NotFinite(const GradientNorm& norm) const;

  [[nodiscard]] RailGate NewGate() const { return {inputs_.lanes_per_node, plan_.buckets}; }
  void AppendCollectGoes(LaneIndex rail, Actions& actions);
  // What may go by now. `all`: how many buckets the table has; `of`: attempt, rail, operation and
  // kind.
  void AppendGo(RailGate& gate, const RailTable& table, int32_t all, const RailReady& of,
                Actions& actions) const;
  void NoteAbsent(const Submission& submission);

  const PlanInputs& inputs_;
  const Plan& plan_;
  const CoordinatorOptions options_;
  RailTables tables_;
  int32_t partials_ = 0;  // CountBuckets() of the tables
  int32_t weights_ = 0;
  int32_t adopts_ = 0;
  std::chrono::microseconds gather_ = kGatherMin;
  std::vector<std::vector<int32_t>> held_;  // per rank: parameters, ascending
  std::vector<NodeRank> without_trainers_;
  OpenAttempt open_;
  StepId last_committed_;
  int32_t skips_in_a_row_ = 0;
  std::optional<Loss> lost_;
  bool suspended_ = false;
  bool halted_ = false;
  std::optional<Decision> applied_;  // the last that consumed a step, or changed the state
  std::map<TrainerRank, Gone> gone_;
  std::map<TrainerRank, uint64_t> incarnations_;  // newest that has attached
  Try try_;
  Attempt publishing_;  // last that committed or restarted; its weights may still cross the rails
  RailGate publish_;
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_STEP_COORDINATOR_H_
