// Reports of a node's trainers and lanes on their way to the coordinator: submissions, and buckets
// that are ready to cross between nodes. They are gathered into few messages. Pure: time is passed
// in.
//
// A round begins when the node hears of an attempt, and takes 17/20 of the attempt's gathering
// time. So the rounds of all nodes end at about the same time, and the coordinator has the time
// that is left for its GOs. The reports of a round are sent at its end; an idle node sends nothing.
// These are sent at once, with all that is held back:
//
//   * the last submission of the node's ranks, and one that withdraws gradients;
//   * the last report that this node has of an operation of an attempt;
//   * every other message, for instance a vote: the coordinator hears all in the order of events.
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

  // `gathers` is false in a group of one, whose coordinator is in the same process: nothing is held
  // back.
  explicit OutgoingReports(bool gathers) : gathers_(gathers) {}

  // A job is planned. `programs` are those of its lanes here, by index; `ranks` is how many of its
  // ranks are here.
  void OnPlan(const std::vector<LaneProgram>& programs, int32_t ranks);
  void OnOpen(TimePoint now, const OpenAttempt& open);
  // Each of the following returns what is to be sent now, in its order.
  [[nodiscard]] Messages OnSubmitted(TimePoint now, v1::RankSubmitted submitted);
  [[nodiscard]] Messages OnReady(TimePoint now, const RailReady& ready);
  // Any other message to the coordinator. REQUIRES: it has no Reports.
  [[nodiscard]] Messages Tell(v1::MemberMessage message);
  // Any message: calls whichever of the three is for it.
  [[nodiscard]] Messages Pass(TimePoint now, v1::MemberMessage message);
  // When to call OnDue(); nullopt: nothing is held back.
  [[nodiscard]] std::optional<TimePoint> due() const { return due_; }
  // Returns what is to be sent; nothing before due().
  [[nodiscard]] Messages OnDue(TimePoint now);
  // Drops what is held back: its job or its coordinator is gone.
  void Forget();

 private:
  // The reports that this node's lanes make of one operation.
  struct Expected {
    int32_t count = 0;  // all of them
    int32_t left = 0;   // those that the present attempt still lacks
  };
  [[nodiscard]] Messages TakeUnless(bool waits, TimePoint now);
  void Hold(const RailReady& ready);
  // Notes the report; true: it is the last of its operation.
  bool Completes(const RailReady& ready);
  bool CompletesSubmissions(const v1::RankSubmitted& submitted);
  [[nodiscard]] TimePoint EndOfRound(TimePoint now) const;
  [[nodiscard]] Messages Take();

  const bool gathers_;
  Expected partials_;
  Expected adopts_;
  Expected weights_;
  // For each bucket of each rail, by rail: which reports are expected of it, and which have come.
  // All that a report needs lies in one place.
  std::vector<uint8_t> marks_;
  int32_t buckets_ = 0;  // of each rail
  int32_t ranks_ = 0;
  TimePoint opened_at_;
  std::chrono::microseconds gather_{0};  // of the open attempt; 0: no attempt is open
  Attempt collected_;                    // whose reports are marked
  Attempt published_;
  Attempt submitting_;
  int32_t submitted_ = 0;  // how many ranks have, under `submitting_`

  std::string job_;  // that all of this is about
  std::vector<v1::RankSubmitted> held_submissions_;
  std::vector<RailReady> held_;  // one for each attempt, rail, operation and kind
  std::optional<TimePoint> due_;
};

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_JOB_OUTGOING_REPORTS_H_
