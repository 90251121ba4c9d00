// The jobs of the pictures of a node's places, for pages that show one after the other.
#ifndef DMUOND_SERVER_DAEMON_METRICS_SEEN_JOB_H_
#define DMUOND_SERVER_DAEMON_METRICS_SEEN_JOB_H_

#include <cmath>
#include <vector>

#include "server/daemon/node_view.h"

namespace dmuond::server {

// Into one of the pictures.
struct SeenJob {
  const v1::JobStatus& status;
  const google::protobuf::RepeatedPtrField<v1::LaneStatus>& lanes;
  const scheduler::JobFigures& figures;
  const scheduler::PlannedJob& planned;
  const double planned_in_s;
};

inline std::vector<SeenJob> JobsOf(const std::vector<Core::Seen>& places) {
  std::vector<SeenJob> jobs;
  for (const Core::Seen& place : places) {
    const NodeView& view = *place.view;
    if (!view.status.has_job()) continue;
    jobs.push_back(
        {view.status.job(), view.status.lanes(), view.figures, view.planned, view.planned_in_s});
  }
  return jobs;
}

// The norm of the gradient of one matrix that a lane of this node owns, in the last vote.
struct MatrixNorm {
  const scheduler::Unit* matrix;
  double norm;
};

inline std::vector<MatrixNorm> MatrixNorms(const SeenJob& job) {
  std::vector<MatrixNorm> norms;
  if (job.planned.plan == nullptr || job.figures.norms == nullptr) return norms;
  const std::vector<scheduler::Unit>& units = job.planned.plan->units;
  norms.reserve(job.figures.norms->size());
  for (const scheduler::UnitNorm& unit : *job.figures.norms) {
    const auto index = static_cast<size_t>(unit.unit.value());
    if (index >= units.size() || units[index].kind != scheduler::UnitKind::kMatrix) continue;
    double sum = 0;
    for (const double block : unit.sums) sum += block;
    norms.push_back({&units[index], std::sqrt(sum)});
  }
  return norms;
}

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_METRICS_SEEN_JOB_H_
