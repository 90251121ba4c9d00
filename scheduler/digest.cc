#include "scheduler/digest.h"

#include "scheduler/plan.h"

namespace dmuond::scheduler {
namespace {

void AddLayout(const Layout& layout, Digest& digest) {
  digest.Add(layout.trainers.size());
  for (const Trainer& trainer : layout.trainers) {
    digest.Add(trainer.rank.value());
    digest.Add(trainer.node.value());
    digest.Add(trainer.home.value());
  }
  digest.Add(layout.parameters.size());
  for (const Parameter& parameter : layout.parameters) {
    digest.Add(parameter.name);
    digest.Add(parameter.shape);
    digest.Add(static_cast<uint8_t>(parameter.weight_type));
    digest.Add(static_cast<uint8_t>(parameter.gradient_type));
    digest.Add(static_cast<uint8_t>(parameter.route));
    digest.Add(static_cast<uint8_t>(parameter.view.kind));
    digest.Add(parameter.view.row_blocks.size());
    for (int64_t block : parameter.view.row_blocks) digest.Add(block);
    digest.Add(parameter.view.heads);
    digest.Add(parameter.group);
    digest.Add(parameter.reduce_factor);
    digest.Add(parameter.ready_order);
  }
  digest.Add(layout.fragments.size());
  for (const LayoutFragment& fragment : layout.fragments) {
    digest.Add(fragment.rank.value());
    digest.Add(fragment.parameter);
    digest.Add(static_cast<uint8_t>(fragment.contribution));
    digest.Add(fragment.box);
  }
}

void AddIteration(const Iteration& iteration, Digest& digest) {
  digest.Add(iteration.steps);
  digest.Add(iteration.rounds);
}

void AddCosts(const CostTable& costs, Digest& digest) {
  digest.Add(costs.device);
  digest.Add(costs.entries.size());
  for (const CostEntry& entry : costs.entries) {
    digest.Add(entry.matrix.rows);
    digest.Add(entry.matrix.cols);
    AddIteration(entry.matrix.iteration, digest);
    digest.Add(entry.batch);
    digest.Add(entry.microseconds);
  }
  digest.Add(costs.choices.size());
  for (const ShapeChoice& choice : costs.choices) {
    digest.Add(choice.rows);
    digest.Add(choice.cols);
    digest.Add(static_cast<uint8_t>(choice.dtype));
    digest.Add(choice.engine);
    digest.Add(choice.form);
  }
  digest.Add(costs.tflops);
  digest.Add(costs.gigabytes_per_second);
  digest.Add(costs.launch_us);
  digest.Add(costs.piece_bytes_per_element);
  digest.Add(costs.matrix_bytes_per_element);
}

void AddPlan(const Plan& plan, Digest& digest) {
  digest.Add(plan.units.size());
  for (const Unit& unit : plan.units) {
    digest.Add(unit.parameter);
    digest.Add(static_cast<uint8_t>(unit.kind));
    digest.Add(unit.box);
    digest.Add(unit.bucket.value());
    digest.Add(unit.owner.value());
    digest.Add(unit.batch);
  }
  digest.Add(plan.buckets);
  for (int32_t bucket : plan.parameter_bucket) digest.Add(bucket);
}

}  // namespace

uint64_t DigestOf(const PlanInputs& inputs, const Plan& plan) {
  Digest digest;
  AddLayout(inputs.layout, digest);
  digest.Add(inputs.nodes);
  digest.Add(inputs.lanes_per_node);
  digest.Add(inputs.lane_memory_bytes);
  // Where memory comes in bytes, digests are what they were before granules were counted.
  if (inputs.memory_granule_bytes != 1) digest.Add(inputs.memory_granule_bytes);
  digest.Add(inputs.bucket_bytes);
  // A plan without has the digest that it always had.
  if (inputs.landing_bytes_max > 0) digest.Add(inputs.landing_bytes_max);
  AddCosts(inputs.costs, digest);
  digest.Add(inputs.iterations.size());
  for (const Iteration& iteration : inputs.iterations) AddIteration(iteration, digest);
  AddPlan(plan, digest);
  return digest.value();
}

}  // namespace dmuond::scheduler
