// A trainer of the step simulator, its client and its launcher: opens, attaches, submits, waits,
// pushes, disagrees, withdraws, hangs, dies and is replaced, goes back when it is told to, and
// attaches again when its daemon was another one. It checks that what it hears follows from what it
// has heard.
#ifndef DMUOND_TESTS_SCHEDULER_SIMULATED_TRAINER_H_
#define DMUOND_TESTS_SCHEDULER_SIMULATED_TRAINER_H_

#include <cstdint>
#include <set>
#include <string>

#include "absl/status/statusor.h"
#include "scheduler/step_member.h"
#include "tests/scheduler/simulation.h"

namespace dmuond::scheduler::testing {

class SimulatedTrainer {
 public:
  SimulatedTrainer(Simulation& simulation, TrainerRank rank, SimulatedMember& member)
      : simulation_(simulation), rank_(rank), member_(member) {}

  // It has attached, before the first attempt.
  void BeginAttached(Attempt attempt);
  void HangAt(StepId step) { hangs_at_ = step; }
  void SetReplaced(bool replaced) { replaced_ = replaced; }

  void Die(const std::string& why);
  // Its launcher ends it, if it lives, and starts the job once more. `discards`: with
  // RESUME_DISCARD.
  void StartAnew(bool discards);
  // Its daemon is gone, with its session.
  void DaemonDied();
  // The job goes back; a trainer that had come to its end has more to do.
  void JobWentBack(const WayBack& back);

  [[nodiscard]] bool HasSignalled(Attempt attempt, BucketId bucket) const {
    return attempt_ == attempt && early_.contains(bucket);
  }
  // Nothing more comes from it, unless the job goes back.
  [[nodiscard]] bool Rests() const {
    return ended_ || finished_ || (alive_ && at_.step == hangs_at_);
  }
  // Its place may be given up before it asks for it: it was empty long before its launcher began.
  [[nodiscard]] bool comes_late() const { return comes_late_; }
  [[nodiscard]] bool finished() const { return finished_; }
  [[nodiscard]] std::string Describe() const;

 private:
  void Start();  // a process, that opens a session
  void Open(uint64_t call);
  void Attach(uint64_t call);
  void Acknowledge(uint64_t call, const WayBack& back);
  void Begin();
  void Submit(uint64_t call, int64_t patience);
  void Answer(uint64_t call, const absl::StatusOr<StepAnswer>& answer);
  void Finish(const StepAnswer& answer);
  void Refused(const absl::Status& status);
  // As a host that waits for its stream, which waits for weights: it makes no call meanwhile.
  void AwaitWeights(uint64_t call, Attempt attempt);
  void GiveUp();
  void Again(int64_t low_ms, int64_t high_ms, Event event);
  // Asks again, ever more rarely, until a daemon would say that it has been too long.
  void AskAgain(Event event);

  Simulation& simulation_;
  const TrainerRank rank_;
  SimulatedMember& member_;

  bool alive_ = true;
  bool replaced_ = false;  // when it dies: somebody takes its place
  bool ended_ = false;     // for good, without having finished
  bool finished_ = false;
  bool comes_late_ = false;
  bool lives_on_ = false;  // the process has trained before it opens this session
  int32_t restarts_ = 0;
  int32_t mistakes_ = 2;
  StepId hangs_at_{-1};

  uint64_t call_ = 0;         // answers to older calls are nobody's
  int64_t asked_since_ = -1;  // microseconds; -1: it does not ask
  int64_t patience_ms_ = 0;   // between two questions
  uint64_t incarnation_ = 0;
  History at_;
  bool has_trained_ = false;  // a launcher that has seen a step wants no other job
  bool discards_ = false;     // until its launch has begun the job
  Attempt attempt_;
  Submission request_;
  bool submitted_ = false;
  std::set<BucketId> early_;  // signalled under attempt_
};

}  // namespace dmuond::scheduler::testing

#endif  // DMUOND_TESTS_SCHEDULER_SIMULATED_TRAINER_H_
