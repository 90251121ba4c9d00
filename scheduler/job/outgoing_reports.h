// What a node's trainers and lanes report, on its way to the coordinator: submissions, and buckets
// that lie ready to cross. They are gathered into few messages. Pure: time is passed in.
//
// Rounds begin when the node hears of an attempt, and take 17/20 of the attempt's gathering
// time: all nodes' rounds end at about the same time, and the coordinator lets go what they bring
// in the time that is left. At the end of a round everything that was reported in it is sent; an
// idle node sends nothing. Sent at once, with all that is held back:
//
//   * the last submission of the node's ranks, and one that withdraws gradients;
//   * what completes an operation of an attempt: nothing more of it will be reported here;
//   * every other message, a vote say. The coordinator hears everything in the order of its making.
#ifndef DMUOND_SCHEDULER_JOB_OUTGOING_REPORTS_H_
#define DMUOND_SCHEDULER_JOB_OUTGOING_REPORTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dmuond/v1/peer.pb.h"
#include "scheduler/lane_program.h"
#include "scheduler/step.h"

namespace dmuond::scheduler {

class OutgoingReports {
 public:
  using Messages = std::vector<v1::MemberMessage>;

  // `gathers` false: in a group of one, whose coordinator is in the same process, nothing waits.
  explicit OutgoingReports(bool gathers) : gathers_(gathers) {}

  // A job's plan: its lanes' programs, by lane index, and how many ranks it has here.
  void OnPlan(const std::vector<LaneProgram>& programs, int32_t ranks);
  void OnOpen(TimePoint now, const OpenAttempt& open);
  // Each returns what is to be sent now, in this order.
  [[nodiscard]] Messages OnSubmitted(TimePoint now, v1::RankSubmitted submitted);
  [[nodiscard]] Messages OnReady(TimePoint now, const RailReady& ready);
  // Any other message to the coordinator. REQUIRES: it has no Reports.
  [[nodiscard]] Messages Tell(v1::MemberMessage message);
  // Any message: one of the three, as it is made of.
  [[nodiscard]] Messages Pass(TimePoint now, v1::MemberMessage message);
  // When OnDue() is due; nullopt: nothing is held back.
  [[nodiscard]] std::optional<TimePoint> due() const { return due_; }
  // Returns what is to be sent; nothing before due().
  [[nodiscard]] Messages OnDue(TimePoint now);
  // Drops what is held back: it was for a coordinator, or of a job, that is no more.
  void Forget();

 private:
  // By rail, then by bucket.
  using Buckets = std::vector<std::vector<bool>>;
  // What the lanes report of one operation, all of it, and what is left of that in an attempt.
  struct Expected {
    Buckets parts;
    int32_t count = 0;
    int32_t left = 0;
  };
  // What was reported of an attempt's operation.
  struct Reported {
    Attempt attempt;
    Buckets buckets;
  };
  [[nodiscard]] Messages TakeUnless(bool waits, TimePoint now);
  void Hold(const RailReady& ready);
  // Notes the report; true: nothing is left of its operation by that.
  bool Completes(const RailReady& ready);
  bool CompletesSubmissions(const v1::RankSubmitted& submitted);
  [[nodiscard]] TimePoint EndOfRound(TimePoint now) const;
  [[nodiscard]] Messages Take();

  const bool gathers_;
  Expected partials_;
  Expected adopts_;
  Expected weights_;
  int32_t ranks_ = 0;
  TimePoint opened_at_;
  std::chrono::microseconds gather_{0};  // of the open attempt; 0: there is none
  Reported collected_;
  Reported published_;
  Attempt submitting_;
  int32_t submitted_ = 0;  // ranks, under `submitting_`

  std::string job_;  // that all of it is of
  std::vector<v1::RankSubmitted> held_submissions_;
  std::vector<RailReady> held_;  // one for each attempt, rail, operation and kind
  std::optional<TimePoint> due_;
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_OUTGOING_REPORTS_H_
