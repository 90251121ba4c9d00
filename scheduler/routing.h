// The routing table: what happens to every parameter, and why. Printed once by every client, so
// that nobody finds out late that a matrix was trained by another optimizer.
#ifndef DMUOND_SCHEDULER_ROUTING_H_
#define DMUOND_SCHEDULER_ROUTING_H_

#include <cstdint>
#include <string>
#include <vector>

#include "scheduler/plan.h"

namespace dmuond::scheduler {

struct RoutingRow {
  std::string parameter;
  Extents shape;
  Route route = Route::kMuon;
  int32_t group = 0;
  int64_t matrices = 0;        // that are orthogonalised each step; 0 unless route is muon
  std::vector<LaneId> owners;  // ascending, each once; none for route trainer
  std::string why;             // the client's reason, then how it is split: "2-D; 32 heads"
};

// One row per parameter of the layout, in its order.
[[nodiscard]] std::vector<RoutingRow> RoutingTable(const Layout& layout, const Plan& plan);

}  // namespace dmuond::scheduler

#endif  // DMUOND_SCHEDULER_ROUTING_H_
