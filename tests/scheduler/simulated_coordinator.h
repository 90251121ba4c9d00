// The coordinator of the step simulator: the GroupJob under test, and what performs its actions.
// Messages take their time, plans too, and some cannot be made. Membership is abstracted to its
// result (membership_simulator.h has the rest): a group breaks as a whole, and forms when every
// daemon lives, under an epoch of its own.
#ifndef DMUOND_TESTS_SCHEDULER_SIMULATED_COORDINATOR_H_
#define DMUOND_TESTS_SCHEDULER_SIMULATED_COORDINATOR_H_

#include <cstdint>
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
  explicit SimulatedCoordinator(Simulation& simulation) : simulation_(simulation) {}
  // The job has been registered, and every rank is attached.
  void BeginAttached();

  // The link of a node is cut, or its daemon dead; node 0's daemon is this one's.
  void Break(const std::string& why);
  void Die();
  void Tick();
  void Hear(NodeRank from, const v1::MemberMessage& message);

  // Nothing is being repaired.
  [[nodiscard]] bool Settled() const;
  void CheckTheEnd() const;
  // By which a node is joined now; null: there is no group.
  [[nodiscard]] Connection* connection(NodeRank node) const {
    return connections_.empty() ? nullptr : connections_[node.value()];
  }
  [[nodiscard]] bool job_lost() const { return job_->lost(); }
  [[nodiscard]] bool has_job() const {
    return job_->phase().has_value() && job_->phase() != GroupJob::Phase::kRegistering;
  }
  [[nodiscard]] std::string Describe() const;

 private:
  [[nodiscard]] GroupJobOptions Options() const;
  Connection& ConnectNext();  // the members' links, in the order of their nodes
  // `again`: a decision that was told before may come.
  void Perform(GroupActions actions, bool again = false);
  void HaveMade(const PlanOrder& order);
  // What must hold of a message that is about to be sent.
  void Check(const Addressed& addressed, bool again);
  void CheckDecision(const v1::Decision& decision, bool again);
  void CheckEnd(const v1::JobEnded& ended);
  void CheckWayBack(int64_t to_step, bool asked);
  void GaveUpAPlace();
  void Form();
  [[nodiscard]] size_t nodes() const { return simulation_.members.size(); }

  Simulation& simulation_;
  uint32_t newest_epoch_ = 1;  // of all that there have been
  bool formed_ = true;
  bool forming_ = false;
  uint64_t boot_ = 1;
  bool found_snapshot_ = false;           // by node 0, when it last looked for one
  std::optional<SnapshotId> saved_;       // last that was begun
  std::vector<Connection*> connections_;  // by node
  std::optional<GroupJob> job_;           // a new one in each of its processes
};

}  // namespace dmuond::scheduler::testing

#endif  // DMUOND_TESTS_SCHEDULER_SIMULATED_COORDINATOR_H_
