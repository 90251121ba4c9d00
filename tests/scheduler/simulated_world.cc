#include "tests/scheduler/simulated_world.h"

#include <array>

#include "scheduler/convert/convert.h"
#include "tests/scheduler/layouts.h"

namespace dmuond::scheduler::testing {
namespace {

SimulatedWorld Make(const std::string& job, const World& world) {
  SimulatedWorld made;
  v1::PlanInputs wire;
  wire.set_job(job);
  wire.set_nodes(world.Inputs()->nodes);
  wire.set_lanes_per_node(world.Inputs()->lanes_per_node);
  for (const Registration& registration : world.registrations) {
    v1::Registration& to = *wire.add_registrations();
    to = ToProto(registration);
    to.set_job(job);
    to.set_world_size(world.trainers());
    to.set_bucket_bytes(1);  // a bucket for each parameter
    for (int group = 0; group < 2; ++group) to.add_groups()->set_preset("dmuon");
    made.registrations.push_back(to);
  }
  made.planned = *MakePlannedJob(wire);
  made.inputs = *made.planned.inputs;
  made.plan = *made.planned.plan;
  made.tables = *MakeRailTables(made.inputs, made.plan);
  const int32_t lanes = made.inputs.nodes * made.inputs.lanes_per_node;
  for (int32_t lane = 0; lane < lanes; ++lane) {
    made.programs.push_back(*MakeLaneProgram(made.inputs, made.plan, LaneId(lane)));
  }
  return made;
}

}  // namespace

std::vector<SimulatedWorld> SimulatedWorlds(const std::string& job) {
  std::vector<SimulatedWorld> worlds;
  worlds.push_back(
      Make(job, World(2, 1, 1).Replicate(Muon("v", {8, 8})).Replicate(AdamW("b", {8}))));
  worlds.push_back(Make(job, World(2, 2, 1)
                                 .Replicate(Muon("u", {8, 8}))
                                 .Replicate(Muon("v", {8, 8}))
                                 .Replicate(AdamW("b", {8}))));
  worlds.push_back(Make(job, World(4, 2, 2)
                                 .Replicate(Muon("u", {8, 8}))
                                 .ShardRows(Muon("v", {9, 8}))
                                 .Replicate(Muon("w", {4, 8}))
                                 .ShardRows(AdamW("e", {10, 4}))));
  worlds.push_back(
      Make(job, World(3, 3, 1).Replicate(Muon("u", {8, 8})).ShardRows(Muon("v", {8, 8}))));
  // The last node of each has no trainers, and owns parameters.
  worlds.push_back(Make(job, World(2, 3, 1)
                                 .Replicate(Muon("u", {8, 8}))
                                 .ShardRows(Muon("v", {8, 8}))
                                 .Replicate(Muon("w", {8, 8}))));
  worlds.push_back(
      Make(job, World(1, 2, 2).Replicate(Muon("u", {8, 8})).Replicate(AdamW("b", {8}))));
  return worlds;
}

size_t WorldBeside(size_t world) {
  constexpr std::array<size_t, 6> kBeside = {0, 1, 5, 4, 3, 2};
  return kBeside[world];
}

void SimulationCounts::Add(const SimulationCounts& other) {
  commits += other.commits;
  pushes += other.pushes;
  skips += other.skips;
  aborts += other.aborts;
  refusals += other.refusals;
  goes += other.goes;
  repeated_answers += other.repeated_answers;
  replacements += other.replacements;
  lane_deaths += other.lane_deaths;
  lane_hangs += other.lane_hangs;
  other_bits += other.other_bits;
  broken_links += other.broken_links;
  daemon_deaths += other.daemon_deaths;
  coordinator_deaths += other.coordinator_deaths;
  departures += other.departures;
  snapshots_seen += other.snapshots_seen;
  reformations += other.reformations;
  redone += other.redone;
  rollbacks += other.rollbacks;
  acknowledged += other.acknowledged;
  weights_awaited += other.weights_awaited;
  snapshots += other.snapshots;
  snapshots_of_others += other.snapshots_of_others;
  failed_snapshots += other.failed_snapshots;
  hung_snapshots += other.hung_snapshots;
  lacking_memory += other.lacking_memory;
  lost_jobs += other.lost_jobs;
  hand_overs += other.hand_overs;
  parked += other.parked;
  ended_jobs += other.ended_jobs;
  begun += other.begun;
}

}  // namespace dmuond::scheduler::testing
