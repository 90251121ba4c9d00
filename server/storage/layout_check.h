// Checks that the state in a snapshot means the same in a job as it is registered now. World,
// nodes, lanes, holders, element types of weights and gradients, and reduce factors may differ. The
// parameters that the daemon trains, their shapes, routes and matrices, and the form of Muon's
// momentum may not: state of one would be wrong in the other. Pure.
#ifndef DMUOND_SERVER_STORAGE_LAYOUT_CHECK_H_
#define DMUOND_SERVER_STORAGE_LAYOUT_CHECK_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dmuond/v1/peer.pb.h"
#include "dmuond/v1/snapshot.pb.h"
#include "kernels/ops.h"
#include "scheduler/layout.h"

namespace dmuond::server::storage {

// The part of a layout that state depends on.
struct JobLayout {
  std::vector<scheduler::Parameter> parameters;
  std::vector<kernels::MomentumForm> momentum;  // per hyperparameter group
};

// INVALID_ARGUMENT, naming the parameter, for what no registration could say.
absl::StatusOr<JobLayout> LayoutOf(const v1::SnapshotManifest& manifest);

// Of a job as it is registered: its merged parameters and its groups, for both of the others.
absl::StatusOr<JobLayout> LayoutOf(
    const std::vector<scheduler::Parameter>& parameters,
    const google::protobuf::RepeatedPtrField<v1::GroupConfig>& groups);
// Puts them, and their hash, into a manifest.
absl::Status SetLayout(const std::vector<scheduler::Parameter>& parameters,
                       const google::protobuf::RepeatedPtrField<v1::GroupConfig>& groups,
                       v1::SnapshotManifest& manifest);

// 16 hexadecimal digits; independent of the parameters' order and of those on route trainer.
[[nodiscard]] std::string LayoutHash(const JobLayout& layout);

// FAILED_PRECONDITION naming the first parameter (by name) that differs, and both values.
[[nodiscard]] absl::Status CheckCompatible(const JobLayout& snapshot, const JobLayout& job);

}  // namespace dmuond::server::storage

#endif  // DMUOND_SERVER_STORAGE_LAYOUT_CHECK_H_
