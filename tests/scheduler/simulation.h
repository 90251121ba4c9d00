// One simulated group, and each of its jobs: what their parts share. A part is a machine under test
// with the little of a daemon that surrounds it (server/daemon): the coordinator, a member with its
// lanes, a trainer. Jobs run side by side: they have the daemons, the links and the coordinator in
// common, and each its own members (a daemon's side of one job), trainers and snapshots.
#ifndef DMUOND_TESTS_SCHEDULER_SIMULATION_H_
#define DMUOND_TESTS_SCHEDULER_SIMULATION_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <iostream>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "scheduler/step.h"
#include "tests/scheduler/chance.h"
#include "tests/scheduler/event_queue.h"
#include "tests/scheduler/simulated_network.h"
#include "tests/scheduler/simulated_world.h"
#include "tests/scheduler/step_invariants.h"

namespace dmuond::scheduler::testing {

class SimulatedCoordinator;
class SimulatedMember;
class SimulatedTrainer;

inline constexpr Microseconds kNever = std::numeric_limits<Microseconds>::max() / 2;

// What a simulated run is like.
struct SimulationOptions {
  StepId last_step{1};
  bool lingers = true;         // places of dead trainers wait for replacements
  int64_t snapshot_every = 0;  // steps; 0: none are made
  std::chrono::milliseconds linger{5'000};
  // In this time members' NodeJobs go on as other ones, from their records, again and again. They
  // count the time of lanes that hang anew, so that it must be short beside all deadlines.
  Microseconds hand_overs_begin = kNever;
  Microseconds hand_overs_end = kNever;
};

// That a job goes back, as its trainers hear and acknowledge it.
struct WayBack {
  StepId to_step;
  GroupEpoch epoch;
  bool operator==(const WayBack&) const = default;
};

// The directory of snapshots: whole ones by id, with the state of each lane.
using SimulatedDisk = std::map<SnapshotId, std::vector<uint64_t>>;

struct Simulation;

struct SimulatedGroup {
  explicit SimulatedGroup(uint64_t seed)
      : seed(seed), chance(seed), hand_overs(~seed), network(chance, time) {}

  // Daemons with all of their members; REQUIRES of the following: there is a job.
  [[nodiscard]] int32_t nodes() const;
  [[nodiscard]] std::vector<SimulatedMember*> MembersOf(NodeRank node) const;

  const uint64_t seed;
  Chance chance;
  Chance hand_overs;  // a source of its own: without them, the same schedule is the same otherwise
  EventQueue time;
  SimulatedNetwork network;
  SimulationCounts counts;
  SimulationOptions options;
  std::deque<Connection> connections;  // of daemons, all that there have been
  size_t pings = 0;  // of lanes, and their answers, that are on their way: there always are some
  Microseconds lanes_fail_until = 0;  // lanes that begin before then die soon, on every node
  bool traced = false;
  bool instant = false;  // it begins: nothing takes time, and nothing fails
  SimulatedCoordinator* coordinator = nullptr;
  std::vector<Simulation*> jobs;
};

// Of one job.
struct Simulation {
  Simulation(SimulatedGroup& group, const SimulatedWorld& world)
      : group(group),
        world(world),
        chance(group.chance),
        hand_overs(group.hand_overs),
        time(group.time),
        network(group.network),
        counts(group.counts),
        options(group.options),
        instant(group.instant),
        invariants(world, group.counts) {}

  SimulatedGroup& group;
  const SimulatedWorld& world;
  Chance& chance;
  Chance& hand_overs;
  EventQueue& time;
  SimulatedNetwork& network;
  SimulationCounts& counts;
  const SimulationOptions& options;
  const bool& instant;
  StepInvariants invariants;
  SimulatedDisk disk;
  bool disturbed = false;                 // not all can finish, and somebody is right to give up
  int32_t launches = 0;                   // so often all ranks were started once more
  std::vector<SimulatedMember*> members;  // by node
  std::vector<SimulatedTrainer*> trainers;

  [[nodiscard]] const std::string& name() const { return world.name(); }
  // What is restored where somebody names a step: the newest snapshot of it.
  // Records of members are kept: they are to be handed over now or soon.
  [[nodiscard]] bool RecordsJobs() const {
    return time.now() >= options.hand_overs_begin &&
           time.now() < options.hand_overs_end + 100 * kMillisecond;
  }
  [[nodiscard]] bool HandsOver() const {
    return time.now() >= options.hand_overs_begin && time.now() < options.hand_overs_end;
  }
  [[nodiscard]] TimePoint Now() const { return TimePoint(std::chrono::microseconds(time.now())); }
  // When a machine has said that something is due; nullopt: nothing is.
  void At(const std::optional<TimePoint>& due, Event event) {
    if (!due.has_value()) return;
    const auto at = std::chrono::ceil<std::chrono::microseconds>(due->time_since_epoch());
    time.At(std::max(time.now(), static_cast<Microseconds>(at.count())), std::move(event));
  }
  // The same for whoever asks: what all trainers agree on.
  [[nodiscard]] bool FateOf(StepId step, const char* what, int32_t percent) const {
    return Mix(group.seed * 31 + static_cast<uint64_t>(step.value()) * 7 + what[0]) % 100 <
           static_cast<uint64_t>(percent);
  }
  void Fail(const std::string& what) { invariants.Fail(what); }
  // What a replayed schedule prints, one event a line.
  template <typename... Parts>
  void Trace(const Parts&... parts) const {
    if (!group.traced) return;
    std::cout << absl::StrCat(time.now(), " us: ", name(), ": ", parts...) << std::endl;
  }
};

inline int32_t SimulatedGroup::nodes() const { return jobs.front()->world.inputs.nodes; }

inline std::vector<SimulatedMember*> SimulatedGroup::MembersOf(NodeRank node) const {
  std::vector<SimulatedMember*> members;
  members.reserve(jobs.size());
  for (const Simulation* job : jobs) members.push_back(job->members[node.value()]);
  return members;
}

}  // namespace dmuond::scheduler::testing

#endif  // DMUOND_TESTS_SCHEDULER_SIMULATION_H_
