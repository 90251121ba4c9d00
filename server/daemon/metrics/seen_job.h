// The jobs of the pictures of a node's places, for pages that show one after the other.
#ifndef DMUOND_SERVER_DAEMON_METRICS_SEEN_JOB_H_
#define DMUOND_SERVER_DAEMON_METRICS_SEEN_JOB_H_

#include <cmath>
#include <numeric>
#include <optional>
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

// What is known of one matrix that a lane of this node owns.
struct SeenMatrix {
  const scheduler::Unit* matrix;
  double norm;  // of its gradient, in the last vote
  // The root mean square of its last update, before the learning rate; none: it had none.
  std::optional<double> update_rms;
};

inline std::vector<SeenMatrix> MatricesOf(const SeenJob& job) {
  std::vector<SeenMatrix> matrices;
  if (job.planned.plan == nullptr || job.figures.norms == nullptr) return matrices;
  const std::vector<scheduler::Unit>& units = job.planned.plan->units;
  std::vector<std::optional<double>> norms(units.size());
  std::vector<std::optional<double>> updates(units.size());
  if (job.figures.updates != nullptr) {
    for (const scheduler::UnitUpdate& update : *job.figures.updates) {
      const auto index = static_cast<size_t>(update.unit.value());
      if (index >= units.size()) continue;
      const auto elements = static_cast<double>(units[index].rows * units[index].cols);
      updates[index] = std::sqrt(update.squares / elements);
    }
  }
  for (const scheduler::UnitNorm& unit : *job.figures.norms) {
    const auto index = static_cast<size_t>(unit.unit.value());
    if (index >= units.size() || units[index].kind != scheduler::UnitKind::kMatrix) continue;
    norms[index] = std::sqrt(std::accumulate(unit.sums.begin(), unit.sums.end(), 0.0));
  }
  for (size_t i = 0; i < units.size(); ++i) {
    if (norms[i].has_value()) matrices.push_back({&units[i], *norms[i], updates[i]});
  }
  return matrices;
}

}  // namespace dmuond::server

#endif  // DMUOND_SERVER_DAEMON_METRICS_SEEN_JOB_H_
