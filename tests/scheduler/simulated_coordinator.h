// The coordinator of the step simulator: the GroupJobs under test, and what performs their actions.
// Messages take their time, plans too, and some cannot be made. Membership is abstracted to its
// result (membership_simulator.h has the rest): a group breaks as a whole, and forms when every
// daemon lives, under an epoch of its own.
#ifndef DMUOND_TESTS_SCHEDULER_SIMULATED_COORDINATOR_H_
#define DMUOND_TESTS_SCHEDULER_SIMULATED_COORDINATOR_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "dmuond/v1/peer.pb.h"
#include "scheduler/job/group_jobs.h"
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
  [[nodiscard]] std::string Describe() const;

 private:
  // Of one job.
  struct Seen {
    bool found_snapshot = false;      // by node 0, when it last looked for one
    std::optional<SnapshotId> saved;  // last that was begun
  };
  [[nodiscard]] GroupJobs Begun() const;
  Connection& ConnectNext();  // the daemons' links, in the order of their nodes
  // `again`: a decision that was told before may come.
  void Perform(GroupActions actions, bool again = false);
  void Send(Simulation& job, Addressed addressed);
  void HaveMade(const PlanOrder& order);
  // What must hold of a message that is about to be sent.
  void Check(Simulation& job, const Addressed& addressed, bool again);
  void CheckDecision(Simulation& job, const v1::Decision& decision, bool again);
  void CheckEnd(Simulation& job, const v1::JobEnded& ended);
  void CheckWayBack(Simulation& job, const SnapshotId& to, bool asked);
  // Has the machines handle an event; `newly_lost` hears of jobs that were lost by it.
  void Observe(const std::function<void()>& event,
               const std::function<void(Simulation&)>& newly_lost);
  void GaveUpAPlace(Simulation& job);
  void Form();
  [[nodiscard]] Simulation& Named(const std::string& job) const;
  [[nodiscard]] TimePoint Now() const { return group_.jobs.front()->Now(); }

  SimulatedGroup& group_;
  uint32_t newest_epoch_ = 1;  // of all that there have been
  bool formed_ = true;
  bool forming_ = false;
  uint64_t boot_ = 1;
  std::map<const Simulation*, Seen> seen_;
  std::vector<Connection*> connections_;  // by node
  std::optional<GroupJobs> jobs_;         // new ones in each of its processes
};

}  // namespace dmuond::scheduler::testing

#endif  // DMUOND_TESTS_SCHEDULER_SIMULATED_COORDINATOR_H_
