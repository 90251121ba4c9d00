// The jobs that are simulated, and what their schedules have had in them.
#ifndef DMUOND_TESTS_SCHEDULER_SIMULATED_WORLD_H_
#define DMUOND_TESTS_SCHEDULER_SIMULATED_WORLD_H_

#include <cstdint>
#include <string>
#include <vector>

#include "dmuond/v1/peer.pb.h"
#include "scheduler/job/planned_job.h"
#include "scheduler/lane_program.h"
#include "scheduler/plan.h"
#include "scheduler/step_rails.h"

namespace dmuond::scheduler::testing {

struct SimulatedWorld {
  [[nodiscard]] const std::string& name() const { return registrations.front().job(); }

  std::vector<v1::Registration> registrations;  // by rank
  PlannedJob planned;                           // of them
  // The same, at hand.
  PlanInputs inputs;
  Plan plan;
  RailTables tables;
  std::vector<LaneProgram> programs;  // by lane
};

// Small worlds of several shapes: nodes, lanes, replicated and sharded. Their jobs have the name.
[[nodiscard]] std::vector<SimulatedWorld> SimulatedWorlds(const std::string& job);
// Of one that has as many nodes and lanes as that of `world`: their jobs can run side by side.
[[nodiscard]] size_t WorldBeside(size_t world);

// Summed over many schedules, so that a test sees that it tests something.
struct SimulationCounts {
  int64_t commits = 0;
  int64_t pushes = 0;
  int64_t skips = 0;
  int64_t aborts = 0;
  int64_t refusals = 0;
  int64_t goes = 0;
  int64_t repeated_answers = 0;  // a submission that found its step decided
  int64_t replacements = 0;      // trainers that took a dead one's place
  int64_t lane_deaths = 0;
  int64_t lane_hangs = 0;
  int64_t other_bits = 0;  // lanes that would have computed other bits than the job began with
  int64_t broken_links = 0;
  int64_t daemon_deaths = 0;
  int64_t coordinator_deaths = 0;
  int64_t departures = 0;      // planned, with all that there was on the disk
  int64_t snapshots_seen = 0;  // by a node that left a broken group, and had not heard of them
  int64_t reformations = 0;    // new lanes over the same memory
  int64_t redone = 0;          // commits that a lane's successor had to apply
  int64_t rollbacks = 0;
  int64_t acknowledged = 0;     // by trainers that lived through one
  int64_t weights_awaited = 0;  // by trainers that make no call meanwhile
  int64_t snapshots = 0;
  int64_t snapshots_of_others = 0;  // made by another group, which had come further
  int64_t failed_snapshots = 0;
  int64_t hung_snapshots = 0;  // of them: given up because a disk hung
  int64_t lacking_memory = 0;  // nodes that had none for a job that goes on from a snapshot
  int64_t lost_jobs = 0;
  int64_t hand_overs = 0;  // NodeJobs that went on as another one, made from their record
  int64_t parked = 0;      // times that lanes were not tried again for a while
  int64_t ended_jobs = 0;  // by somebody, or discarded; all ranks were started once more
  int64_t begun = 0;       // attempts that nodes without trainers were told of

  void Add(const SimulationCounts& other);
};

}  // namespace dmuond::scheduler::testing

#endif  // DMUOND_TESTS_SCHEDULER_SIMULATED_WORLD_H_
