// The coordinator of the step simulator: a GroupJob under test for each job, and what performs
// their actions. Messages take their time, plans too, and some cannot be made. Membership is
// abstracted to its result (membership_simulator.h has the rest): a group breaks as a whole, and
// forms when every daemon lives, under an epoch of its own.
#ifndef DMUOND_TESTS_SCHEDULER_SIMULATED_COORDINATOR_H_
#define DMUOND_TESTS_SCHEDULER_SIMULATED_COORDINATOR_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "dmuond/v1/peer.pb.h"
#include "scheduler/job/group_job.h"
#include "tests/scheduler/simulated_member.h"
#include "tests/scheduler/simulation.h"

namespace dmuond::scheduler::testing {

class SimulatedCoordinator {
 public:
  explicit SimulatedCoordinator(SimulatedGroup& group) : group_(group) {}
  // The jobs have been registered, and every rank is attached.
  void BeginAttached();

  // The link of a node is cut, or its daemon dead; node 0's daemon is this one's.
  void Break(const std::string& why);
  void Die();
  void Tick();
  // From a member of `job`.
  void Hear(NodeRank from, Simulation& job, const v1::MemberMessage& message);

  // Nothing of it is being repaired.
  [[nodiscard]] bool Settled(const Simulation& job) const;
  void CheckTheEnd(Simulation& job) const;
  // By which a node is joined now; null: there is no group.
  [[nodiscard]] Connection* connection(NodeRank node) const {
    return connections_.empty() ? nullptr : connections_[node.value()];
  }
  [[nodiscard]] bool Lost(const Simulation& job) const;
  // It is there, planned or not, or it is not known yet what members hold of it.
  [[nodiscard]] bool Knows(const Simulation& job) const;
  // It is there, and planned.
  [[nodiscard]] bool Has(const Simulation& job) const;
  // All ranks are started once more, as after the end of a job, or, with RESUME_DISCARD, to end it.
  void StartAnew(Simulation& job, bool discards);
  [[nodiscard]] std::string Describe() const;

 private:
  // Of one job.
  struct Seen {
    bool found_snapshot = false;      // by node 0, when it last looked for one
    std::optional<SnapshotId> saved;  // last that was begun
  };
  // New machines, as in a new process.
  void Begin();
  [[nodiscard]] GroupJob& Of(const Simulation& job) { return machines_.at(&job); }
  [[nodiscard]] const GroupJob& Of(const Simulation& job) const { return machines_.at(&job); }
  Connection& ConnectNext();  // the daemons' links, in the order of their nodes
  // `again`: a decision that was told before may come.
  void Perform(Simulation& job, GroupActions actions, bool again = false);
  void Send(Simulation& job, Addressed addressed);
  void HaveMade(Simulation& job, const PlanOrder& order);
  // What must hold of a message that is about to be sent.
  void Check(Simulation& job, const Addressed& addressed, bool again);
  void CheckDecision(Simulation& job, const v1::Decision& decision, bool again);
  void CheckEnd(Simulation& job, const v1::JobEnded& ended);
  void CheckWayBack(Simulation& job, const SnapshotId& to, bool asked);
  // Has the job's machine handle an event. True: the job was lost by it.
  bool Observe(Simulation& job, const std::function<void()>& event);
  void GaveUpAPlace(Simulation& job);
  void Form();
  [[nodiscard]] TimePoint Now() const { return group_.jobs.front()->Now(); }

  SimulatedGroup& group_;
  uint32_t newest_epoch_ = 1;  // of all that there have been
  bool formed_ = true;
  bool forming_ = false;
  uint64_t boot_ = 1;
  std::map<const Simulation*, Seen> seen_;
  std::vector<Connection*> connections_;  // by node
  std::map<const Simulation*, GroupJob> machines_;
};

}  // namespace dmuond::scheduler::testing

#endif  // DMUOND_TESTS_SCHEDULER_SIMULATED_COORDINATOR_H_
