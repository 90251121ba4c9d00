// What ranks of a small job register, and what becomes of its lanes, as the coordinator hears it.
#ifndef DMUOND_TESTS_SCHEDULER_JOB_REGISTRATIONS_H_
#define DMUOND_TESTS_SCHEDULER_JOB_REGISTRATIONS_H_

#include <cstdint>

#include "dmuond/v1/peer.pb.h"

namespace dmuond::scheduler {

// A rank of the job "job": a replicated 4 x 4 matrix "w" on Muon, fp32.
inline v1::Registration OfOneMatrix(int32_t rank, int32_t world_size) {
  v1::Registration registration;
  registration.set_rank(rank);
  registration.set_job("job");
  registration.set_world_size(world_size);
  registration.add_groups()->set_preset("dmuon");
  v1::Parameter& parameter = *registration.add_parameters();
  parameter.set_name("w");
  parameter.set_weight_type(v1::ELEMENT_TYPE_FLOAT32);
  parameter.set_gradient_type(v1::ELEMENT_TYPE_FLOAT32);
  parameter.set_route(v1::ROUTE_MUON);
  parameter.set_reduce_factor(1);
  v1::Fragment& fragment = *registration.add_fragments();
  fragment.set_contribution(v1::CONTRIBUTION_SUM);
  for (int dimension = 0; dimension < 2; ++dimension) {
    parameter.add_shape(4);
    fragment.mutable_box()->add_begin(0);
    fragment.mutable_box()->add_end(4);
  }
  for (v1::Slice* slice : {fragment.mutable_gradient(), fragment.mutable_weight()}) {
    slice->add_strides(4);
    slice->add_strides(1);
  }
  fragment.mutable_weight()->set_arena(1);
  return registration;
}

// The snapshot of a step that the first epoch has made.
inline v1::SnapshotId SnapshotOf(int64_t step) {
  v1::SnapshotId id;
  id.set_attempt((uint64_t{1} << 32) + static_cast<uint64_t>(step));
  id.set_step(step);
  return id;
}

// A node's lanes are ready to compute by the plan, in this epoch.
inline v1::MemberMessage LanesReady(uint64_t plan_digest, uint32_t epoch) {
  v1::MemberMessage message;
  message.mutable_plan_ready()->set_digest(plan_digest);
  message.mutable_plan_ready()->set_epoch(epoch);
  return message;
}

// One that was started for this epoch has died.
inline v1::MemberMessage LaneLost(uint32_t epoch) {
  v1::MemberMessage message;
  message.mutable_lane_lost()->set_epoch(epoch);
  message.mutable_lane_lost()->set_detail("killed");
  return message;
}

}  // namespace dmuond::scheduler

#endif  // DMUOND_TESTS_SCHEDULER_JOB_REGISTRATIONS_H_
