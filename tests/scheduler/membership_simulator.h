// A group's joining, beating and dying in one thread and one seed: the membership machine of node 0
// and the other daemons over a network that delays, loses links and replays news. Daemons are
// killed and come back with another boot id, are stopped and wake with the old one, lose their
// links and notice late or not at all; the coordinator is one of them.
//
// What must hold, always:
//   * a group forms with one living, joined process of every node, and never fewer;
//   * its epoch is larger than every epoch that one of its processes has been in;
//   * a member that was heard of within the timeout is not lost by silence, and one that was not
//     is, within the timeout and a tick;
//   * the end of an older process's stream does not touch its successor;
//   * a second process does not take the place of a living one;
//   * once nothing more goes wrong, the group forms, and every member is in that epoch.
//
//   const std::string broken = MembershipSimulator(seed).Run();   // empty: every invariant held
#ifndef DMUOND_TESTS_SCHEDULER_MEMBERSHIP_SIMULATOR_H_
#define DMUOND_TESTS_SCHEDULER_MEMBERSHIP_SIMULATOR_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/membership.h"
#include "tests/scheduler/chance.h"
#include "tests/scheduler/event_queue.h"

namespace dmuond::scheduler::testing {

// What the schedules of many seeds have in them.
struct MembershipCounts {
  int64_t formed = 0;
  int64_t broken = 0;
  int64_t deaths = 0;
  int64_t coordinator_deaths = 0;
  int64_t stops = 0;
  int64_t cut_links = 0;
  int64_t refused = 0;
  int64_t silences = 0;  // groups broken by silence alone
};

class MembershipSimulator {
 public:
  explicit MembershipSimulator(uint64_t seed);
  [[nodiscard]] std::string Run();
  [[nodiscard]] const MembershipCounts& counts() const { return counts_; }

 private:
  using Milliseconds = int64_t;
  // One connection of a member to the coordinator, with the ends that each side has seen.
  struct Link {
    int32_t node = 0;
    uint64_t boot = 0;              // of the member's process
    uint64_t coordinator_boot = 0;  // of the machine that it reaches
    bool silent = false;            // nothing arrives any more, and nobody is told
    bool ended_here = false;
    bool ended_there = false;
    Milliseconds last_up = 0;  // messages keep their order
    Milliseconds last_down = 0;
  };
  struct Process {
    NodeRank node;
    uint64_t boot = 0;  // 0: dead
    bool stopped = false;
    GroupEpoch epoch;     // newest that it has been in
    uint64_t link = 0;    // 0: none
    bool formed = false;  // in its own view
    Milliseconds heard = 0;
    std::vector<Event> waiting;  // what a stopped process will do when it wakes
  };

  int64_t Pick(int64_t low, int64_t high) { return chance_.Pick(low, high); }
  bool Chance(int32_t percent) { return chance_.Of(percent); }
  void After(Milliseconds delay, Event event) { time_.After(delay, std::move(event)); }
  void Fail(const std::string& what);
  [[nodiscard]] TimePoint Now() const;

  [[nodiscard]] MemberInfo InfoOf(const Process& process) const;
  void StartCoordinator();
  // Runs in the process now or, if it is stopped, when it wakes; not at all when it has died.
  void In(int32_t node, uint64_t boot, Event event);
  void Up(uint64_t link, Event at_coordinator);
  void Down(uint64_t link, Event at_member);

  void Join(int32_t node, uint64_t boot);
  void Joined(uint64_t link, const MemberInfo& info);
  void Beat(int32_t node, uint64_t boot);
  void LinkEndedAtMember(uint64_t link);
  void LinkEndedAtCoordinator(uint64_t link);
  void CutLink(uint64_t link);
  void Silence(uint64_t link);

  void Tick();
  void Perform(const std::vector<MembershipAction>& actions);
  void Check(const GroupFormed& formed);
  void Check(const GroupBroken& broken);

  void Disturb();
  void Kill(int32_t node);
  void Start(int32_t node);
  void Stop(int32_t node);
  void Wake(int32_t node);
  [[nodiscard]] bool Settled() const;
  [[nodiscard]] std::string Describe() const;

  testing::Chance chance_;
  EventQueue time_;  // milliseconds
  const int32_t nodes_;
  const HeartbeatOptions options_;
  Milliseconds calm_from_ = 0;  // nothing goes wrong after it

  uint64_t boots_ = 0;
  uint64_t links_made_ = 0;
  std::map<uint64_t, Link> links_;
  std::vector<Process> processes_;  // by node; 0 holds the machine
  std::optional<MembershipMachine> machine_;
  struct Held {
    uint64_t boot = 0;
    uint64_t link = 0;
    Milliseconds heard = 0;  // as the machine was told
  };
  std::map<int32_t, Held> joined_;                // as the machine has accepted them
  std::map<uint64_t, GroupEpoch> epoch_of_boot_;  // newest epoch that a process has been in

  MembershipCounts counts_;
  std::string failure_;
};

}  // namespace dmuond::scheduler::testing

#endif  // DMUOND_TESTS_SCHEDULER_MEMBERSHIP_SIMULATOR_H_
